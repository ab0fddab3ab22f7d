"""Ways through the page that several tests and figures take: a measured model, its comparison, the guided path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from explorer.view.text.tour import STEPS
from tests.browser.settled import press, settled

if TYPE_CHECKING:
    from playwright.sync_api import Page

ANSWERED = re.compile(r"; gradients (?!not (compared|safe)|being compared)")
"""The headline of a policy that was measured."""
APP = Path(__file__).resolve().parent.parent.parent / "app.py"


def measured(page: Page, url: str) -> Page:
    """Once the baseline of the model is measured and drawn."""
    page.goto(url)
    page.get_by_text("Measured with everything kept.").wait_for()
    page.get_by_test_id("stPlotlyChart").first.wait_for()
    return settled(page)


def confirm_marks(page: Page, text: str | re.Pattern[str]) -> None:
    """Waits until the server counts the chosen blocks as `text`, or judges them so."""
    page.locator(".figure .value").get_by_text(text, exact=True).wait_for()


def compared(page: Page) -> None:
    """Recomputes all layers and waits for the comparison. Plans move the graph when they arrive: a press may miss."""
    layers = page.locator('[data-id="layers"]')
    while not layers.locator(".count").get_by_text(re.compile(r"^(\d+) of \1$")).is_visible():
        press(page, layers.get_by_role("button", name="Recompute all"))
    press(page, page.get_by_role("button", name="Run", exact=True))
    page.get_by_text(ANSWERED).wait_for()
    page.wait_for_function("() => !location.search.includes('job=')")  # the store may have shown an earlier run of it
    page.get_by_test_id("stPlotlyChart").first.wait_for()


IS_BELOW = """panel => {
    const graph = [...document.querySelectorAll("*")].find((e) => e.shadowRoot?.querySelector(".graph"))
    const charts = document.querySelector(`.st-key-${panel}`)
    return graph && charts && charts.getBoundingClientRect().top >= graph.getBoundingClientRect().bottom - 1
}"""


def stacks_when_narrow(page: Page, panel: str) -> None:
    """Checks that the charts of `panel` stand beside the graph, and below it once the window is narrow."""
    assert not settled(page).evaluate(IS_BELOW, panel)
    page.set_viewport_size({"width": 800, "height": 900})
    page.wait_for_function(IS_BELOW, arg=panel, polling=100)


def guided(page: Page, saved: Path) -> Iterator[str]:
    """Walks the guided path from the recorded sample to the policy file, which it saves. Yields the text of each step
    once its task is done."""
    page.get_by_text("recorded on another machine").first.wait_for()
    page.get_by_role("button", name="New here?").click()
    panel = page.locator(".st-key-tour")
    for step in STEPS[: [step.key for step in STEPS].index("take") + 1]:
        panel.locator("strong").get_by_text(step.title, exact=True).wait_for()
        if step.key == "guess":
            press(page, panel.locator(".st-key-tour_guesses button").first)
        elif step.key == "toggle":
            press(page, page.locator('[data-id="blocks"]').get_by_role("button", name="Recompute all"))
        elif step.key == "run":
            press(page, page.get_by_role("button", name="Run", exact=True))
        elif step.key == "take":
            press(page, page.get_by_role("button", name="Policy file"))
            with page.expect_download() as download:
                page.get_by_role("button", name="Download (YAML)").click()
            download.value.save_as(saved)
            page.keyboard.press("Escape")
            page.get_by_role("button", name="Download (YAML)").wait_for(state="hidden")
        onward = panel.get_by_role("button", name="Next", exact=True)  # another name while the task is not done
        onward.wait_for()
        yield panel.inner_text()
        press(page, onward)
