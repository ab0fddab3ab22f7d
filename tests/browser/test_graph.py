"""The block graph in a real browser: no click is lost at any speed, keys work, names stay names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from explorer.ui.components import GraphMarks, payload
from explorer.view.graph import browser
from explorer.view.graph.browser import Paint
from explorer.view.graph.geometry import layout
from explorer.view.graph.nesting import default_open
from tests import graphs
from tests.browser.settled import settled

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

GRAPH_PAGE = Path(__file__).resolve().parent / "graph_page.py"

WATCH_LISTENERS = """
    if (!globalThis.listening) {
        globalThis.listening = new Map()
        const [add, remove] = [document.addEventListener, document.removeEventListener]
        const ours = (act) => act.toString().includes("onPress")
        document.addEventListener = (...a) => (ours(a[1]) && listening.set(a[0], a[1]), add.apply(document, a))
        document.removeEventListener = (...a) => (listening.delete(a[0]), remove.apply(document, a))
    }
"""


@pytest.fixture
def open_graph(page: Page, serve: Callable[..., object]) -> Callable[..., Page]:
    def opened(kind: str, n: int = 12) -> Page:
        page.add_init_script(WATCH_LISTENERS)
        page.goto(f"{serve(GRAPH_PAGE).url}?kind={kind}&n={n}")  # type: ignore[attr-defined]
        page.get_by_role("treeitem").first.wait_for()
        return page

    return opened


def row(page: Page, name: str) -> Locator:
    return page.locator(f'[data-id="{name}"]')


def confirmed(page: Page, *names: str) -> None:
    """Waits until the server says that exactly these blocks are marked."""
    from playwright.sync_api import TimeoutError as Late

    words = f"confirmed: {' '.join(sorted(names)) or 'none'}"
    try:
        page.get_by_text(words, exact=True).wait_for()
    except Late:
        drawn = page.locator('[data-id][aria-checked="true"]').evaluate_all("rows => rows.map((r) => r.dataset.id)")
        raise AssertionError(f"{words!r} never came; the server: {server_text(page)}; drawn: {drawn}") from None


def server_text(page: Page) -> list[str]:
    return page.get_by_text("confirmed: ").all_inner_texts()


def unfold(page: Page, name: str, first: str) -> None:
    row(page, name).locator(".fold").click()
    row(page, first).wait_for()


PRESET = "Every second"
CLICK = """([names, gap]) => new Promise(async (done) => {
    const host = [...document.querySelectorAll("*")].find((e) => e.shadowRoot?.querySelector(".graph"))
    for (const name of names) {
        const block = host?.shadowRoot.querySelector(`[data-id="${name}"]`)
        const target = block ?? [...document.querySelectorAll("button")].find((e) => e.innerText === name)
        target.click()
        await new Promise((next) => setTimeout(next, gap))
    }
    done()
})"""


def test_fast_clicks_lose_nothing_and_count_in_their_order_around_a_preset(open_graph: Callable[..., Page]) -> None:
    page = open_graph("gpt")
    unfold(page, "blocks", "blocks.11")
    ids = [f"blocks.{i}" for i in range(10)]
    for gap_ms in (0, 10, 50):
        page.evaluate(CLICK, [ids, gap_ms])
        confirmed(page, *ids)
        assert page.locator('[data-id^="blocks."][aria-checked="true"]').count() == 10
        page.evaluate(CLICK, [ids[:5], gap_ms])
        confirmed(page, *ids[5:])
        settled(page)  # late answers must not bring old marks back
        assert page.locator('[data-id^="blocks."][aria-checked="true"]').count() == 5
        page.evaluate(CLICK, [ids[5:], gap_ms])
        confirmed(page)

    evens = [f"blocks.{i}" for i in range(0, 12, 2)]
    for i, gap_ms in zip((1, 3, 5, 7), (0, 10, 50, 0)):
        one, other = f"blocks.{i}", f"blocks.{i + 4}"
        page.evaluate(CLICK, [[one, PRESET, other], gap_ms])
        confirmed(page, *evens, other)
        page.evaluate(CLICK, [[PRESET, one, other, one], gap_ms])
        confirmed(page, *evens, other)
        page.evaluate(CLICK, [[one, other, PRESET], gap_ms])
        confirmed(page, *evens)
    settled(page)  # late answers must not bring old marks back
    assert page.locator('[data-id^="blocks."][aria-checked="true"]').count() == len(evens)


OVERTAKEN = """async ([source, data]) => {
    const file = URL.createObjectURL(new Blob([source], {type: "text/javascript"}))
    const { default: answer } = await import(file)
    const parentElement = document.body.appendChild(document.createElement("div"))
    parentElement.innerHTML = '<div class="graph"></div>'
    const sent = []
    const setStateValue = (_, { list }) => sent.push(list.map(({ n, ids }) => [n, ...ids]))
    const call = () => answer({ data: [data], parentElement, setStateValue })
    const end = call()
    for (const id of ["embedding", "head"]) {
        parentElement.querySelector(`[data-id="${id}"]`).click()
        end() // as Streamlit does with a call that the next answer overtook
        call()
    }
    parentElement.remove()
    end()
    return [sent, listening.size]
}"""


def test_a_call_that_was_overtaken_takes_no_clicks_with_it(page: Page) -> None:
    page.add_init_script(WATCH_LISTENERS)
    page.goto("data:text/html,")
    graph = graphs.gpt(3)
    data = payload(layout(graph, default_open(graph)), GraphMarks(), Paint(labels={}))
    told = [[[1, "embedding"]], [[1, "embedding"], [2, "head"]]]
    assert page.evaluate(OVERTAKEN, [browser.script(), data]) == [told, 0]


COLOURS = """name => {
    const host = [...document.querySelectorAll("*")].find((e) => e.shadowRoot?.querySelector(".graph"))
    const { backgroundColor, color } = getComputedStyle(host.shadowRoot.querySelector(`[data-id="${name}"]`))
    return [backgroundColor, color]
}"""


def test_it_follows_light_and_dark_and_leaves_no_listener_behind(open_graph: Callable[..., Page]) -> None:
    page = open_graph("gpt", 3)
    light = page.evaluate(COLOURS, "norm")
    assert light[0] == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"light => !({COLOURS})('norm').some((colour) => light.includes(colour))", arg=light)

    page.evaluate(CLICK, [["Remove"], 0])
    page.get_by_role("treeitem").first.wait_for(state="detached")
    page.wait_for_function("() => listening.size === 0")
    page.evaluate(CLICK, [["Remove"], 0])
    page.get_by_role("treeitem").first.wait_for()
    assert page.evaluate("listening.size") == 3


def test_everything_works_by_keyboard(open_graph: Callable[..., Page]) -> None:
    page = open_graph("gpt", 3)
    row(page, "embedding").focus()
    press = page.keyboard.press
    press("Space")
    confirmed(page, "embedding")
    press("ArrowDown")
    press("Enter")
    confirmed(page, "embedding", "dropout")
    press("ArrowDown")
    press("ArrowRight")
    row(page, "blocks.0").wait_for()
    press("ArrowRight")
    assert page.evaluate("() => document.activeElement.shadowRoot.activeElement.dataset.id") == "blocks.0"
    press("Space")
    confirmed(page, "blocks.0", "dropout", "embedding")
    press("i")
    page.get_by_text("selected: blocks.0").wait_for()
    press("ArrowLeft")
    press("ArrowLeft")
    row(page, "blocks.0").wait_for(state="detached")
    press("End")
    press("Space")
    confirmed(page, "blocks.0", "dropout", "embedding", "head")
    press("Home")
    press("Space")
    confirmed(page, "blocks.0", "dropout", "head")


def test_a_folded_run_toggles_all_one_or_none(open_graph: Callable[..., Page]) -> None:
    page = open_graph("gpt", 4)
    run = row(page, "blocks")
    assert run.get_attribute("aria-expanded") == "false"
    assert run.locator(".times").inner_text() == "×4"
    run.get_by_role("button", name="Recompute all").click()
    confirmed(page, *(f"blocks.{i}" for i in range(4)))
    assert run.get_attribute("aria-checked") == "true"
    run.locator(".cell").nth(2).click()
    confirmed(page, "blocks.0", "blocks.1", "blocks.3")
    assert run.get_attribute("aria-checked") == "mixed"
    run.get_by_role("button", name="Keep all").click()
    confirmed(page)
    assert run.get_attribute("aria-checked") == "false"


def test_cuts_toggle_by_click_and_key_and_refuse_with_a_reason(open_graph: Callable[..., Page]) -> None:
    page = open_graph("unet")
    cut = page.locator('[data-cut="down1>down2"]')
    cut.click()
    page.get_by_text("cuts: down1>down2").wait_for()
    cut.focus()
    page.keyboard.press("Enter")
    page.get_by_text("cuts: selected:", exact=False).wait_for()
    refused = page.locator('[data-cut="down0>down1"]')
    assert "skip from down0" in (refused.get_attribute("title") or "")
    refused.click(force=True)
    refused.focus()
    assert page.evaluate("() => document.activeElement.shadowRoot.activeElement.dataset.cut") == "down0>down1"
    page.keyboard.press("Enter")
    settled(page)
    assert refused.get_attribute("aria-checked") == "false"
    page.get_by_text("cuts: selected:", exact=False).wait_for()


def test_hostile_names_stay_names(open_graph: Callable[..., Page]) -> None:
    page = open_graph("hostile")
    name = "<img src=x onerror=pwned=1>"
    page.get_by_text(name).first.wait_for()
    page.locator("[data-id]").first.click()
    page.get_by_text(f"confirmed: {name}").wait_for()
    settled(page)
    assert page.evaluate("() => globalThis.pwned === undefined")
    assert page.locator("[data-id] img").count() == 0


def test_a_thousand_blocks_answer(open_graph: Callable[..., Page]) -> None:
    page = open_graph("wide", 125)
    assert page.get_by_role("treeitem").count() > 1000
    page.evaluate(CLICK, [["blocks.3", "blocks.70"], 0])
    confirmed(page, "blocks.3", "blocks.70")


def test_what_a_screen_reader_hears_and_a_folded_box_says_of_blocks_inside(open_graph: Callable[..., Page]) -> None:
    page = open_graph("gpt", 3)
    assert row(page, "embedding").get_attribute("aria-label") == "embedding, Embedding, 1.0 MiB"
    for button in page.locator(".graph button").all():
        name = button.get_attribute("aria-label") or ""
        assert sum(letter.isalpha() for letter in name) > 3, name
    row(page, "norm").locator(".pick").click()
    page.get_by_text("selected: norm").wait_for()
    assert row(page, "norm").get_attribute("aria-checked") == "false"
    assert row(page, "norm").get_attribute("aria-selected") == "true"
    unfold(page, "blocks", "blocks.0")
    unfold(page, "blocks.0", "blocks.0.mlp")
    row(page, "blocks.0").locator(".chip").click()
    confirmed(page, "blocks.0")
    inner = row(page, "blocks.0.mlp")
    assert inner.locator(".chip").inner_text() == "recomputed"
    assert inner.get_attribute("aria-description") == "recomputed with blocks.0"
    assert inner.get_attribute("aria-checked") == "false"

    row(page, "blocks.0").locator(".chip").click()
    row(page, "blocks.0.mlp").locator(".chip").click()
    row(page, "blocks.1").locator(".chip").click()
    confirmed(page, "blocks.0.mlp", "blocks.1")
    row(page, "blocks.0").locator(".fold").click()
    row(page, "blocks.0.mlp").wait_for(state="detached")
    assert row(page, "blocks.0").locator(".count").inner_text() == "1 inside recomputed"
    assert row(page, "blocks.0").locator(".chip").inner_text() == "part inside"
    assert row(page, "blocks.0").get_attribute("aria-description") == "1 inside recomputed"
    row(page, "blocks").locator(".fold").click()
    row(page, "blocks.0").wait_for(state="detached")
    assert row(page, "blocks").locator(".count").inner_text() == "1 of 3, 1 inside them"
