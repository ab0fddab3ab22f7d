"""The plainest models on the real page: all tabs are drawn, the guided path begins, and nothing raises."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from explorer.ui.explore.results import TABS
from explorer.view.words.tour import STEPS
from tests.browser.measured import APP
from tests.browser.served import HERE, Served
from tests.browser.settled import settled

if TYPE_CHECKING:
    from playwright.sync_api import Page

FACTORIES = re.findall(r"^def (\w+)\(\):", (HERE / "plain_models.py").read_text(), re.MULTILINE)
STILL_MS = 120
"""Less than elsewhere: a tab asks for one rerun, and there are seventy."""
ANSWER = re.compile("Measured with everything kept|The run trains nothing")


def test_plain_models_have_all_tabs_and_the_first_steps_of_the_guided_path(
    page: Page, serve: Callable[..., Served], tmp_path: Path
) -> None:
    """One server, one visitor: a start for each of the ten would cost more than what is tested."""
    file = shutil.copy(HERE / "plain_models.py", tmp_path)
    app = serve(APP, *(f"--model={file}:{name}" for name in FACTORIES))
    faults = {name: fault for name in FACTORIES if (fault := _walk(page, f"{app.url}/?model={file}:{name}"))}
    assert len(FACTORIES) == 10 and not faults


def _walk(page: Page, address: str) -> str:
    """Opens a model, begins the guided path and looks at every tab. Returns the first fault; empty: none."""
    raised = page.get_by_test_id("stException")

    def fault(where: str) -> str:
        settled(page, still_ms=STILL_MS)
        if raised.count():
            return f"{where}: {raised.first.inner_text()[:200]}"
        drawn = page.get_by_role("tab").all_inner_texts()
        return "" if drawn == TABS else f"{where}: tabs {drawn}"

    page.goto(address)
    page.get_by_text(ANSWER).or_(raised).first.wait_for()
    page.get_by_role("tab").or_(raised).first.wait_for()
    if found := fault("opened"):
        return found
    if (offer := page.get_by_role("button", name="Show me")).count():  # not where nothing can be measured
        offer.click()
        for step in STEPS[:4]:
            page.locator(".st-key-tour strong").get_by_text(step.title, exact=True).wait_for()
            page.get_by_role("button", name=re.compile("Next|Skip this step")).click()
    for tab in TABS:
        page.get_by_role("tab", name=tab, exact=True).click()
        if found := fault(tab):
            return found
    return ""
