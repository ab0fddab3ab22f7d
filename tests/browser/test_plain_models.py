"""The plainest models, opened one after another on one page: every tab and the guided path's first steps are drawn."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from explorer.ui.explore.results import TABS
from explorer.view.text.lab import STEPS
from tests.browser.conftest import FACTORIES, PLAIN
from tests.browser.served import Served
from tests.browser.settled import press, settled

if TYPE_CHECKING:
    from playwright.sync_api import Page

ANSWER = re.compile("Measured with everything kept|The run trains nothing")


def test_plain_models_raise_in_no_tab_and_not_on_the_guided_path(page: Page, app: Served) -> None:
    """The path is walked to its fourth step on one model, and back to its first on the next; so are the tabs."""
    page.goto(f"{app.url}/lab")
    press(page, page.get_by_role("button", name="Guided path"))
    panel = page.locator(".st-key-tour")
    panel.wait_for()
    steps, tabs, onward = list(STEPS[:4]), list(TABS), "next"
    for name in reversed(FACTORIES):  # the largest first: its search ends with the next model's run
        box = settled(page).get_by_role("combobox", name=re.compile("Model$"))
        box.fill(f"{PLAIN.name}, {name}")
        box.press("Enter")
        page.wait_for_url(re.compile(rf"{name}\b"))
        page.get_by_text(ANSWER).first.wait_for()
        for step in steps:
            panel.locator("strong").get_by_text(step.title, exact=True).wait_for()
            if step is not steps[-1]:
                press(page, page.locator(f".st-key-tour_{onward} button"))
        for tab in tabs:
            press(page, page.get_by_role("tab", name=tab, exact=True))
            assert settled(page).get_by_test_id("stException").count() == 0, (name, tab)
            assert page.get_by_role("tab").all_inner_texts() == TABS
        steps, tabs, onward = steps[::-1], tabs[::-1], "back" if onward == "next" else "next"
