"""What the page offers for another program is the text that the command line writes, which tests/cli runs there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from explorer.plan.export.formats import FORMATS, exported
from explorer.plan.policy.file import load
from tests.browser.served import Served
from tests.browser.settled import press

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_what_was_chosen_on_the_page_leaves_for_other_programs(page: Page, app: Served, tmp_path: Path) -> None:
    page.goto(app.url)
    page.get_by_text("Measured with everything kept.").wait_for()
    press(page, page.get_by_role("button", name="Presets"))
    press(page, page.get_by_role("menuitem", name="Every second"))
    page.locator(".figure .value").get_by_text(re.compile(r"^2 (of \d+ )?blocks$")).wait_for()
    page.keyboard.press("Escape")
    press(page, page.get_by_role("button", name="Run", exact=True))
    page.locator(".figure .value").get_by_text("bitwise equal", exact=True).wait_for()
    press(page, page.get_by_role("button", name="Policy file"))
    with page.expect_download() as download:
        page.get_by_role("button", name="Policy with evidence").click()
    download.value.save_as(tmp_path / "policy.yaml")
    policy = load(tmp_path / "policy.yaml")
    assert policy.policy.blocks == ("layers.0", "layers.2")
    for target in ("torch", "lightning"):
        title = FORMATS[target].title
        choice = page.get_by_role("combobox", name=re.compile("For another program"))
        choice.fill(title)
        choice.press("Enter")
        with page.expect_download() as download:
            page.get_by_role("button", name=f"For {title}").click()
        download.value.save_as(tmp_path / target)
        assert (tmp_path / target).read_text() == exported(policy, target).text
