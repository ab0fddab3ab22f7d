"""The plainest models on the real page: tabs are drawn, the guided path begins, and nothing raises."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from explorer.ui.explore.results import TABS
from explorer.view.text.lab import STEPS
from tests.browser.measured import APP
from tests.browser.served import HERE, Served
from tests.browser.settled import settled

if TYPE_CHECKING:
    from playwright.sync_api import Page

FACTORIES = re.findall(r"^def (\w+)\(\):", (HERE / "plain_models.py").read_text(), re.MULTILINE)
STILL_MS = 120
"""Less than elsewhere: a tab asks for one rerun, and there are thirty."""
WHOLE = ("one_parameter", "buffers_only")
"""Models that have neither blocks nor, the second, a backward: each tab is opened, and the guided path begins."""
ANSWER = re.compile("Measured with everything kept|The run trains nothing")


def test_plain_models_raise_in_no_tab_and_not_on_the_guided_path(
    page: Page, serve: Callable[..., Served], tmp_path: Path
) -> None:
    """One visitor opens all ten models. Most models open the plans, where a preset may choose nothing, and one other
    tab in turn."""
    file = shutil.copy(HERE / "plain_models.py", tmp_path)
    app = serve(APP, *(f"--model={file}:{name}" for name in FACTORIES))
    faults = {}
    for i, name in enumerate(FACTORIES):
        tabs = TABS[1:] if name in WHOLE else [TABS[1], TABS[2 + i % len(TABS[2:])]]
        if fault := _walk(page, f"{app.url}/?model={file}:{name}", tabs, guided=i == 0 or name in WHOLE):
            faults[name] = fault
    assert len(FACTORIES) == 10 and not faults


def _walk(page: Page, address: str, tabs: list[str], *, guided: bool) -> str:
    """Opens a model, begins the guided path and looks at `tabs`. Returns the first fault; empty: none."""
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
    if guided and (offer := page.get_by_role("button", name="New here?")).count():  # not where nothing can be measured
        offer.click()
        for step in STEPS[:4]:
            page.locator(".st-key-tour strong").get_by_text(step.title, exact=True).wait_for()
            page.get_by_role("button", name=re.compile("Next|Skip this step")).click()
    for tab in tabs:
        page.get_by_role("tab", name=tab, exact=True).click()
        if found := fault(tab):
            return found
    return ""
