"""The plainest models, opened one after another on one page: tabs and the guided path's first steps are drawn."""

from __future__ import annotations

import re
from itertools import cycle, islice
from typing import TYPE_CHECKING

from explorer.ui.explore.results import TABS
from explorer.view.text.tour import STEPS
from tests.browser.conftest import FACTORIES, PLAIN, TIMEOUT_MS
from tests.browser.served import Served
from tests.browser.settled import press, settled

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

ANSWER = re.compile("Measured with everything kept|The run trains nothing")


def test_plain_models_raise_in_no_tab_and_not_on_the_guided_path(page: Page, app: Served) -> None:
    """Each step of the path stands beside several models. It says the same beside each but the GPT: tests/ui.

    A model is drawn with the tab that its neighbour left open and with two more: two models of one kind share all five.
    """
    from playwright.sync_api import expect

    page.goto(f"{app.url}/lab")
    press(page, page.get_by_role("button", name="Guided path"))
    title = page.locator(".st-key-tour strong")
    steps, tabs = cycle([*STEPS[:4], *STEPS[2:0:-1]]), cycle([*TABS[1:], TABS[0]])
    at = next(steps)
    for name in reversed(FACTORIES):  # the largest first: its search ends with the next model's run
        box = settled(page).get_by_role("combobox", name=re.compile("Model$"))
        box.fill(f"{PLAIN.name}, {name}")
        box.press("Enter")
        page.wait_for_url(re.compile(rf"{name}\b"))
        page.get_by_text(ANSWER).first.wait_for()
        title.get_by_text(at.title, exact=True).wait_for()
        assert settled(page).get_by_test_id("stException").count() == 0, name
        for tab in islice(tabs, 2):
            press(page, page.get_by_role("tab", name=tab, exact=True))
            page.get_by_role("tab", name=tab, exact=True, selected=True).wait_for()
            assert settled(page).get_by_test_id("stException").count() == 0, (name, tab)
            expect(page.get_by_role("tab")).to_have_text(TABS, timeout=TIMEOUT_MS)  # the page may be drawn anew
        before, at = at, next(steps)
        onward = "next" if STEPS.index(before) < STEPS.index(at) else "back"
        press(page, page.locator(f".st-key-tour_{onward} button"))
        title.get_by_text(at.title, exact=True).wait_for()


def test_a_model_without_blocks_gets_its_chart_and_ends_its_preview(page: Page, app: Served) -> None:
    """Chart and page waited for the first block of a graph that has none."""
    address, chart = f"{app.url}/?model={PLAIN}:linear", page.locator(".st-key-first .js-plotly-plot .trace").first
    page.goto(address)
    chart.wait_for()
    scripts: list[Route] = []
    holds = [True]
    page.route("**/static/js/index.*", lambda route: scripts.append(route) if holds else route.continue_())
    page.goto(address, wait_until="commit")
    page.locator('#preview > [data-part="chart"]').wait_for()
    holds.clear()
    for route in scripts:
        route.continue_()
    chart.wait_for()
    page.unroute("**/static/js/index.*")
    assert page.locator("#preview").count() == 0
