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
FIRST_STEPS = STEPS[:4]


def test_plain_models_raise_in_no_tab_and_not_on_the_guided_path(page: Page, app: Served) -> None:
    """The path is walked to its fourth step on one model, and back to its first on the next."""
    page.goto(f"{app.url}/lab")
    press(page, page.get_by_role("button", name="Guided path"))
    panel = page.locator(".st-key-tour")
    panel.wait_for()
    for place, name in enumerate(reversed(FACTORIES)):  # the largest first: its search ends with the next model's run
        box = settled(page).get_by_role("combobox", name=re.compile("Model$"))
        box.fill(f"{PLAIN.name}, {name}")
        box.press("Enter")
        page.wait_for_url(re.compile(rf"{name}\b"))
        settled(page).get_by_text(ANSWER).first.wait_for()
        for step in FIRST_STEPS if place % 2 == 0 else FIRST_STEPS[::-1]:
            panel.locator("strong").get_by_text(step.title, exact=True).wait_for()
            if step is not FIRST_STEPS[-1 if place % 2 == 0 else 0]:
                press(page, page.locator(f".st-key-tour_{'next' if place % 2 == 0 else 'back'} button"))
        for tab in TABS:
            press(page, page.get_by_role("tab", name=tab, exact=True))
            assert settled(page).get_by_test_id("stException").count() == 0, (name, tab)
            assert page.get_by_role("tab").all_inner_texts() == TABS
