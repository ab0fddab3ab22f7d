"""The whole path in the page: open, choose, run, take away for three programs, run there.

The same path on a model of transformers is walked on the command line, tests/cli/test_whole_path.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from explorer.plan.export.formats import FORMATS
from tests.browser.settled import press
from tests.exported import LAYERS, file_of, layers_again, run_there

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parent.parent.parent


def test_what_was_chosen_on_the_page_runs_there(page: Page, serve: Callable[..., object], tmp_path: Path) -> None:
    net, holder, targets = LAYERS, "layers", ("torch", "fsdp2", "lightning")
    (tmp_path / "net.py").write_text(net)
    page.goto(serve(ROOT / "app.py", "--model", f"{tmp_path / 'net.py'}:build").url)  # type: ignore[attr-defined]
    page.get_by_text("Measured with everything kept.").wait_for()
    press(page, page.get_by_role("button", name="Presets"))
    press(page, page.get_by_role("menuitem", name="Every second"))
    page.locator(".figure .value").get_by_text(re.compile(r"^2 (of \d+ )?blocks$")).wait_for()
    page.keyboard.press("Escape")
    press(page, page.get_by_role("button", name="Run", exact=True))
    page.locator(".figure .value").get_by_text("bitwise equal", exact=True).wait_for()
    press(page, page.get_by_role("button", name="Policy file"))
    for target in targets:
        title = FORMATS[target].title
        choice = page.get_by_role("combobox", name=re.compile("For another program"))
        choice.fill(title)
        choice.press("Enter")
        with page.expect_download() as download:
            page.get_by_role("button", name=f"For {title}").click()
        download.value.save_as(tmp_path / file_of(target))
    for target, outcome in run_there(tmp_path, targets).items():
        assert outcome["same"], target
        assert layers_again(outcome, holder) == {f"{holder}.0", f"{holder}.2"}, (target, outcome)
