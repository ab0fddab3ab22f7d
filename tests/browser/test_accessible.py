"""What everybody has to be able to read and reach: contrast in both themes, names of all controls, the timeline."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from explorer.view.drawing.colours import CURSOR
from tests.browser.contrast import too_faint
from tests.browser.settled import press, settled

if TYPE_CHECKING:
    from playwright.sync_api import Page

APP = Path(__file__).resolve().parent.parent.parent / "app.py"
CURSOR_RGB = "rgb({}, {}, {})".format(*bytes.fromhex(CURSOR.removeprefix("#")))
CONTROLS = {
    "button", "checkbox", "combobox", "link", "menuitem", "radio", "searchbox", "slider", "spinbutton", "switch", "tab",
    "textbox", "treeitem",
}  # fmt: skip


@pytest.fixture(params=["light"])
def explore(page: Page, serve: Callable[..., object], tiny: str, request: pytest.FixtureRequest) -> Page:
    """The page in a colour scheme, once the baseline of the tiny model is measured and drawn."""
    page.emulate_media(color_scheme=request.param)
    page.goto(serve(APP, "--model", tiny).url)  # type: ignore[attr-defined]
    page.get_by_text("Measured with everything kept.").wait_for()
    page.get_by_test_id("stPlotlyChart").first.wait_for()
    return settled(page)


def compared(page: Page) -> None:
    """Recomputes all layers and waits for the comparison."""
    page.locator('[data-id="layers"]').get_by_role("button", name="Recompute all").click()
    press(page, page.get_by_role("button", name="Run", exact=True))
    page.get_by_text("Baseline and the policy that is drawn.").wait_for()
    page.wait_for_function("() => !location.search.includes('job=')")  # the store may have shown an earlier run of it
    page.get_by_test_id("stPlotlyChart").first.wait_for()


def without_a_name(page: Page) -> list[str]:
    """Controls that a screen reader cannot tell: no name, a glyph, or the name of an icon."""
    tree = page.context.new_cdp_session(settled(page)).send("Accessibility.getFullAXTree")["nodes"]
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node.get("ignored") and node["role"]["value"] in CONTROLS
    ]
    assert len(named) > 3, "the page has no controls"
    return [f"{role} {name!r}" for role, name in named if not re.search(r"\w", name) or name.endswith(" icon")]


@pytest.mark.parametrize("explore", ["light", "dark"], indirect=True)
def test_every_word_on_every_page_reads_and_every_control_has_a_name(explore: Page) -> None:
    page = explore
    faint: dict[str, list[str]] = {}
    nameless: dict[str, list[str]] = {}

    def look(place: str) -> None:
        faint[place], nameless[place] = too_faint(page), without_a_name(page)

    look("before a run")
    compared(page)
    for tab in ("Cost", "Gradients", "Blocks", "Autograd", "Memory"):
        press(page, page.get_by_role("tab", name=tab))
        look(tab)
    for menu in ("Presets", "Options", "Policy file", "Run file"):
        press(page, page.get_by_role("button", name=menu))
        look(menu)
        page.keyboard.press("Escape")
    page.locator('[data-id="layers"]').get_by_role("button", name="Keep all").click()
    page.locator('[data-id="head"]').click()
    look("for the previous policy")
    for link in ("Pipeline", "Lab", "Runs"):
        press(page, page.get_by_role("link", name=link))
        page.get_by_role("button").first.wait_for()
        look(link)
    assert {place: words for place, words in faint.items() if words} == {}
    assert {place: names for place, names in nameless.items() if names} == {}


def test_a_click_on_the_timeline_draws_a_cursor_lights_blocks_and_answers_in_view(explore: Page) -> None:
    from playwright.sync_api import TimeoutError as NotYet

    page = explore
    compared(page)
    plot = page.locator(".st-key-results .js-plotly-plot").first
    cursor = plot.locator(f'.shapelayer path[style*="{CURSOR_RGB}"]')
    assert cursor.count() == 0
    assert lit(page) == 0

    area = settled(page).locator(".st-key-results .js-plotly-plot .nsewdrag").first.bounding_box()
    assert area is not None
    top = area["y"] + 6  # far above both curves: the nearest moment along x answers
    page.mouse.move(area["x"] + 0.3 * area["width"], top)
    answer = plot.locator(".hoverlayer")
    answer.get_by_text("held, baseline").wait_for()
    answer.get_by_text("held, candidate").wait_for()
    here = answer.text_content()
    page.mouse.move(area["x"] + 0.7 * area["width"], top)
    page.wait_for_function("([node, was]) => node.textContent !== was", arg=[answer.element_handle(), here])

    moment = page.locator(".st-key-moment")
    words = moment.get_by_text(re.compile(r"^Event [\d,]+ of the \w+, .* held, most by"))
    for _ in range(6):  # plans that arrive redraw the page: a click in that instant meets a chart that goes away
        area = settled(page).locator(".st-key-results .js-plotly-plot .nsewdrag").first.bounding_box()
        assert area is not None
        page.mouse.click(area["x"] + 0.3 * area["width"], area["y"] + 6)
        with contextlib.suppress(NotYet):
            words.wait_for(timeout=30_000)
            break
    words.wait_for()
    settled(page)
    box, window = moment.bounding_box(), page.viewport_size
    assert box is not None
    assert window is not None
    assert 0 <= box["y"] <= box["y"] + box["height"] <= window["height"]
    assert cursor.count() == 1
    assert lit(page) > 0

    press(page, page.get_by_role("button", name="Back to the peak"))
    moment.wait_for(state="detached")
    assert settled(page).locator(".st-key-moment").count() == cursor.count() == lit(page) == 0


def lit(page: Page) -> int:
    """Blocks of the graph that show what they held at the picked moment."""
    boxes = [heat.bounding_box() for heat in page.locator(".heat").all()]
    return sum(box is not None and box["width"] > 0 for box in boxes)
