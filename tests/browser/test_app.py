"""The whole path in a real browser: model, toggle, run, refresh, compare, timeline, budget, ranks; who may connect."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import urllib.request
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest

from explorer.record import ModelRef, Policy, RunSpec
from explorer.ui.session.address import to_query
from explorer.view.drawing.colours import CURSOR
from tests.browser.measured import ANSWERED, confirm_marks, stacks_when_narrow
from tests.browser.served import Served
from tests.browser.settled import press, settled

if TYPE_CHECKING:
    from playwright.sync_api import Page

GROWN = """() => [...document.querySelectorAll(".js-plotly-plot")].map((chart) => chart._fullLayout)
    .filter(({ _size, margin }) => ["l", "r", "t", "b"].some((side) => _size[side] > margin[side]))
    .map(({ _size, margin, xaxis }) => [xaxis.title.text, _size, margin])"""
"""Charts with a margin that was too small: Plotly has drawn them again."""
CURSOR_RGB = "rgb({}, {}, {})".format(*bytes.fromhex(CURSOR.removeprefix("#")))


@pytest.fixture
def explore(page: Page, app: Served) -> Page:
    """The page once the baseline of the tiny model is measured."""
    page.goto(app.url)
    page.get_by_role("treeitem").first.wait_for()
    page.get_by_text("Measured with everything kept.").wait_for()
    return settled(page)


def test_a_policy_is_toggled_run_compared_found_after_a_refresh_and_hidden_from_a_second_visitor(explore: Page) -> None:
    page = explore
    page.locator('[data-id="layers"]').get_by_role("button", name="Recompute all").click()
    page.locator('[data-id="head"]').click()  # no other test of this app runs the policy
    confirm_marks(page, re.compile(r"^4 of 4 blocks and 1 more$"))
    page.locator(".figure .value").first.get_by_text("≈").wait_for()
    press(page, page.get_by_role("button", name="Run", exact=True))
    page.get_by_role("button", name="Cancel").wait_for()
    page.wait_for_url("**job=**")
    page.reload()  # finds the run under way
    page.locator('[data-id="layers"][aria-checked="true"]').wait_for()
    page.get_by_text(ANSWERED).wait_for()
    page.wait_for_function("() => !location.search.includes('job=')")
    confirm_marks(page, re.compile(r"^4 of 4 blocks and 1 more$"))
    confirm_marks(page, "bitwise equal")
    a_click_on_the_timeline_draws_a_cursor_lights_blocks_and_answers_in_view(page)
    a_film_moves_a_line_over_the_chart_and_fills_the_blocks_that_run(page)
    for tab in ("Cost", "Gradients", "Memory"):
        press(page, page.get_by_role("tab", name=tab))
        page.get_by_role("tab", name=tab, selected=True).wait_for()
        evidence = page.get_by_text(re.compile("^Every bit of"))
        evidence.or_(page.get_by_test_id("stPlotlyChart").locator("visible=true")).first.wait_for()
        assert settled(page).evaluate(GROWN) == []
        assert page.get_by_test_id("stException").count() == 0

    bar = settled(page).locator(".st-key-ledger .bars .point path").first
    bar.scroll_into_view_if_needed()
    settled(page)
    bar.click(force=True)
    page.locator('[data-id][aria-selected="true"]').wait_for()

    second = page.context.new_page()
    second.goto(page.url.split("?")[0])
    second.locator('[data-id="layers"]').get_by_role("button", name="Recompute all").click()
    confirm_marks(second, re.compile(r"^4 of 4 blocks$"))
    assert settled(second).locator('[data-id="head"][aria-checked="true"]').count() == 0
    press(page, page.get_by_role("tab", name="Cost"))
    assert settled(page).locator('[data-id="head"][aria-checked="true"]').count() == 1
    confirm_marks(page, re.compile(r"^4 of 4 blocks and 1 more$"))


REST_LONG = "() => { const wait = setTimeout; setTimeout = (f, ms, ...of) => wait(f, ms === 200 ? 60000 : ms, ...of) }"
DRAWN = """() => {
    const roots = [...document.querySelectorAll("*")].map((e) => e.shadowRoot).filter(Boolean)
    const texts = (selector) => roots.flatMap((root) => [...root.querySelectorAll(selector)].map((e) => e.innerText))
    const lines = ':is(.st-key-top, .st-key-budget_line) [data-testid="stMarkdown"] p'
    const sentences = [...document.querySelectorAll(lines)]
    const seen = sentences.filter((p) => p.offsetParent).map((p) => [p.innerText, p.querySelectorAll("strong").length])
    const bottom = document.querySelector('[data-testid="stBottomBlockContainer"]')
    const alerts = [...bottom.querySelectorAll('[data-testid="stAlert"], .desk-danger')]
    const dangers = alerts.filter((e) => e.offsetParent).map((e) => e.innerText.split("\\n").at(-1)).filter(Boolean)
    return [texts(".figure"), texts(".row .line"), seen, dangers]
}"""
"""Figures, labels and sentence, as a reader sees them."""
IS_NEW = f"before => JSON.stringify(({DRAWN})()) !== JSON.stringify(before)"
LINES = """() => [...document.querySelectorAll('.st-key-first .desk-line path[stroke-dasharray]')]
    .filter((path) => path.checkVisibility()).length"""


PRESSES = [[("button", "Presets"), ("menuitem", "Every second:")], [("button", "Undo")], [("button", "Redo")], []]


def test_a_click_is_answered_before_streamlit_is_told_and_the_rerun_agrees(explore: Page) -> None:
    page, tops = explore, explore.locator(".figure .value")
    undo = page.get_by_role("button", name="Undo")
    page.locator(".st-key-first .nsewdrag").first.wait_for(state="attached")  # a sketch has no line
    for block, count in (("head", "0 of 4 blocks and 1 more"), ("layers", "4 of 4 blocks and 1 more")):
        page.evaluate(REST_LONG)
        settled(page).locator(f'[data-id="{block}"]').click()
        told = page.url
        confirm_marks(page, count)
        undo.wait_for()
        answered = page.evaluate(DRAWN)
        assert page.url == told, "Streamlit knows nothing yet"
        is_predicted = "≈" in tops.first.inner_text()  # another test of this app may have run the policy
        assert page.evaluate(LINES) == is_predicted, "the line of the policy before is hidden"
        tops.first.click()  # a press outside tells it
        page.wait_for_function("told => location.href !== told", arg=told)
        assert settled(page).evaluate(DRAWN) == answered
        assert page.evaluate(LINES) == is_predicted
    page.evaluate(REST_LONG)
    for buttons in PRESSES:
        before, told = page.evaluate(DRAWN), page.url
        for role, name in buttons:
            page.get_by_role(role, name=name).click()  # type: ignore[arg-type]
        if not buttons:
            page.get_by_label("Search blocks").fill("layers.*")
            page.keyboard.press("Enter")
        page.wait_for_function(IS_NEW, arg=before)
        answered = page.evaluate(DRAWN)
        assert page.url == told, "Streamlit knows nothing yet"
        tops.first.click()
        page.wait_for_function("told => location.href !== told", arg=told)
        assert settled(page).evaluate(DRAWN) == answered
    page.reload()


def test_a_known_danger_is_written_and_taken_back_before_streamlit_is_told(page: Page, app: Served, tiny: str) -> None:
    spec = RunSpec(model=ModelRef(target=tiny), policy=Policy(preserve_rng_state=False))
    page.goto(f"{app.url}?{urlencode(to_query(spec))}")
    page.get_by_text("Measured with everything kept.").wait_for()
    settled(page).evaluate(REST_LONG)
    tell, told = page.locator(".figure .value").first, page.get_by_test_id("stAlert").get_by_text("Known before")
    for button, n_on in (("Recompute all", 4), ("Keep all", 0)):
        page.locator('[data-id="layers"]').get_by_role("button", name=button).click()
        confirm_marks(page, f"{n_on} of 4 blocks")
        answered = page.evaluate(DRAWN)
        assert bool(answered[-1]) == bool(n_on) != bool(told.count()), "Streamlit has drawn nothing yet"
        tell.click()
        told.first.wait_for(state="visible" if n_on else "detached")
        assert settled(page).evaluate(DRAWN) == answered
    page.reload()


def a_click_on_the_timeline_draws_a_cursor_lights_blocks_and_answers_in_view(page: Page) -> None:
    from playwright.sync_api import TimeoutError as NotYet

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
    here = answer.text_content()
    page.mouse.move(area["x"] + 0.7 * area["width"], top)
    page.wait_for_function("([node, was]) => node.textContent !== was", arg=[answer.element_handle(), here])

    moment = page.locator(".st-key-moment")
    words = moment.get_by_text(re.compile(r"^Event [\d,]+ of the \w+, .* held, most by"))
    for _ in range(6):  # plans that arrive redraw the page: a click in that instant meets a chart that goes away
        area = settled(page).locator(".st-key-results .js-plotly-plot .nsewdrag").first.bounding_box()
        assert area is not None
        for share in (0.5, 0.3):  # a chart that was drawn again answers no click before the pointer moves over it
            page.mouse.move(area["x"] + share * area["width"], area["y"] + 6)
            answer.get_by_text("held, baseline").wait_for()
        page.mouse.down()
        page.mouse.up()
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


def a_film_moves_a_line_over_the_chart_and_fills_the_blocks_that_run(page: Page) -> None:
    words, track = page.locator(".film .words"), page.get_by_role("slider", name="Moment of the step")
    layers = page.locator('[data-id="layers"]')
    play = settled(page).get_by_role("button", name="▶ Play", exact=True)
    play.click()  # tests prefer reduced motion: each press is a still
    play.click()
    assert track.get_attribute("aria-valuenow") == "1"
    page.emulate_media(reduced_motion="no-preference")
    play.click()
    words.get_by_text(re.compile(r"^forward of layers\.\d: .* held$")).wait_for()
    page.locator('[data-id="layers"][data-phase="forward"]').wait_for()
    assert layers.locator('.cell[data-phase="forward"]').count() == 1
    words.get_by_text(re.compile(r"^recompute of layers\.\d: .* held$")).wait_for()
    page.get_by_role("button", name="❚❚ Pause").click()
    page.emulate_media(reduced_motion="reduce")
    track.press("Home")
    assert track.get_attribute("aria-valuenow") == "0"
    page.get_by_role("button", name="One block on").click()
    assert track.get_attribute("aria-valuenow") == "1"
    track.press("End")
    words.get_by_text(re.compile("^optimizer")).wait_for()
    assert layers.get_attribute("data-phase") == ""
    plot, thumb = page.locator(".st-key-first .nsewdrag").bounding_box(), page.locator(".film .over").bounding_box()
    assert plot is not None and thumb is not None
    assert all(abs(plot[edge] - thumb[edge]) < 1 for edge in ("x", "y", "width", "height"))
    track.press("Escape")
    words.wait_for(state="hidden")
    assert page.locator(".graph.film").count() == 0


def lit(page: Page) -> int:
    """Blocks of the graph that show what they held at the picked moment."""
    boxes = [heat.bounding_box() for heat in page.locator(".heat").all()]
    return sum(box is not None and box["width"] > 0 for box in boxes)


def test_a_factory_that_raises_is_a_sentence_and_the_app_lives(page: Page, app: Served, tiny: str) -> None:
    page.goto(f"{app.url}/?model={tiny.replace(':build', ':broken')}")
    page.get_by_text("the factory says no").first.wait_for()
    press(page, page.get_by_text("Traceback").first)
    assert page.get_by_test_id("stException").count() == 0


def handshake(port: int, host: str, origin: str | None) -> int:
    """Status of a WebSocket handshake as a page at `origin` would make it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {
        "Host": host,
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version": "13",
    }
    if origin:
        headers["Origin"] = origin
    connection.request("GET", "/_stcore/stream", headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_only_this_machine_may_connect_and_no_site_may_frame_the_page(app: Served) -> None:
    port = app.port
    for path in ("/", "/pipeline", "/_stcore/health"):
        with urllib.request.urlopen(f"http://localhost:{port}{path}") as response:
            assert response.headers["X-Frame-Options"] == "DENY"
            assert response.headers["Content-Security-Policy"] == "frame-ancestors 'none'"
            links = re.findall(r"</static/js/(\w+)\.\S+\.js>; rel=modulepreload", str(response.headers))
            named = [] if path.startswith("/_") else ["BidiComponent", "PlotlyChart", "recordbatch", "serialization"]
            assert sorted(links) == named, "a document names the chart library and what components need"
    own = f"localhost:{port}"
    assert handshake(port, own, f"http://{own}") == 101
    assert handshake(port, own, "http://evil.example") == 403
    assert handshake(port, f"evil.example:{port}", f"http://evil.example:{port}") == 403
    outside = [info[4][0] for info in socket.getaddrinfo(socket.gethostname(), port, type=socket.SOCK_STREAM)]
    for address in {address for address in outside if not str(address).startswith(("127.", "::1"))}:
        with pytest.raises(OSError), socket.create_connection((address, port), timeout=5):
            pass


def ranks_are_chosen_drawn_and_toggled(page: Page) -> None:
    """A real play of two ranks, and of the policy that is drawn."""
    press(page, page.get_by_role("button", name="Options"))
    number = page.get_by_role("spinbutton", name="ranks", exact=True)
    number.fill("2")
    number.press("Enter")
    page.get_by_text("predict on, 2 ranks, FSDP2 x 2").wait_for()
    page.keyboard.press("Escape")
    bars = page.locator(".st-key-ranks_at_peak")
    bars.get_by_text("ranks 0 to 1", exact=True).wait_for()
    page.get_by_text(re.compile(r"^all-gather \(\d+\)$")).first.wait_for()
    settled(page).locator('[data-id="layers"]').get_by_role("button", name="Recompute all").click()
    confirm_marks(page, re.compile(r"^4 of 4 blocks$"))
    page.locator(".figure .value").first.get_by_text("≈").wait_for()
    press(page, page.get_by_role("button", name="Predict", exact=True))
    page.get_by_text("Candidate", exact=True).first.wait_for()
    bars.get_by_text("recomputed", exact=True).wait_for()
    assert page.get_by_test_id("stException").count() == 0


def test_the_question_mark_lists_the_keys_but_not_for_one_who_types(explore: Page) -> None:
    page = settled(explore)
    sheet = page.get_by_role("dialog", name="Keys")
    field = page.get_by_label("Budget", exact=True).first
    field.press_sequentially("?")
    assert field.input_value() == "?" and not sheet.is_visible()
    field.fill("")
    page.locator(".figure .value").first.click()
    page.keyboard.press("?")
    sheet.get_by_text("Recompute the block, or keep it").wait_for()
    page.keyboard.press("Escape")
    sheet.wait_for(state="hidden")
    page.get_by_role("link", name="Lab").click()
    page.get_by_text("Dropout must draw the same mask again").first.wait_for()
    page.keyboard.press("?")
    sheet.get_by_role("button", name="Close the list of keys").click()
    sheet.wait_for(state="hidden")


def test_the_graph_follows_slider_typed_budget_and_ranks_and_a_run_keeps_the_budget(explore: Page) -> None:
    page = explore
    page.get_by_text("Type a budget, or drag").wait_for()
    slider = settled(page).get_by_role("slider", name="Less memory, more time")
    box = slider.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 8, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 4, box["y"] + box["height"] / 2, steps=6)
    page.locator(".figure .value").first.get_by_text("≈").wait_for()  # while it is held
    page.mouse.up()
    page.get_by_role("button", name="Undo").wait_for()
    field = page.get_by_label("Budget", exact=True).first
    settled(page)
    field.press_sequentially("9")
    field.press("Control+z")
    assert page.get_by_role("button", name="Redo").count() == 0 and field.input_value() == "", "it undoes letters there"
    page.locator(".figure .value").first.click()
    page.keyboard.press("Control+z")
    page.get_by_role("button", name="Redo").wait_for()
    confirm_marks(page, re.compile(r"^0 (of \d+ )?blocks$"))

    field.fill("1 KiB")
    field.press("Enter")
    page.get_by_text(re.compile("the least that (can be reached|was found)")).wait_for()
    assert page.locator('[data-id][aria-checked="true"]').count() == 0
    page.get_by_text("Type a budget, or drag").wait_for(state="detached")
    field.fill("80 %")
    field.press("Enter")
    page.get_by_text("predicted: within").wait_for()
    page.locator(".figure .value").first.get_by_text("≈").wait_for()
    confirm_marks(page, re.compile(r"^[1-9]\d* of 4 blocks"))
    press(page, page.get_by_role("button", name="Run", exact=True))
    page.get_by_text("measured: within").wait_for()
    press(page, page.get_by_role("tab", name="Budget"))
    page.locator(".st-key-front .scatterlayer .point").first.wait_for()
    press(page, page.get_by_role("button", name="Undo"))
    confirm_marks(page, re.compile(r"^0 (of \d+ )?blocks$"))
    press(page, page.get_by_role("tab", name="Memory"))
    ranks_are_chosen_drawn_and_toggled(page)
    stacks_when_narrow(page, "results")
