"""A click on the timeline: a cursor there, blocks lit by what they held, and an answer in view."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from explorer.view.drawing.colours import CURSOR
from tests.browser.measured import compared, measured
from tests.browser.served import Served
from tests.browser.settled import press, settled

if TYPE_CHECKING:
    from playwright.sync_api import Page

CURSOR_RGB = "rgb({}, {}, {})".format(*bytes.fromhex(CURSOR.removeprefix("#")))


def test_a_click_on_the_timeline_draws_a_cursor_lights_blocks_and_answers_in_view(page: Page, app: Served) -> None:
    from playwright.sync_api import TimeoutError as NotYet

    page.emulate_media(color_scheme="light")
    compared(measured(page, app.url))
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
    cursor.wait_for(state="attached")  # Plotly draws after the page has settled
    settled(page)
    box, window = moment.bounding_box(), page.viewport_size
    assert box is not None
    assert window is not None
    assert 0 <= box["y"] <= box["y"] + box["height"] <= window["height"]
    assert cursor.count() == 1
    assert lit(page) > 0

    press(page, page.get_by_role("button", name="Back to the peak"))
    moment.wait_for(state="detached")
    cursor.wait_for(state="detached")
    assert settled(page).locator(".st-key-moment").count() == lit(page) == 0


def lit(page: Page) -> int:
    """Blocks of the graph that show what they held at the picked moment."""
    boxes = [heat.bounding_box() for heat in page.locator(".heat").all()]
    return sum(box is not None and box["width"] > 0 for box in boxes)
