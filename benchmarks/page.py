"""How fast the page answers in a real Chromium: click to confirmed toggle, and the page once the server answers.

Three graphs: 24 blocks, and 1,000 blocks folded as they are at first, and unfolded. A click is confirmed when the text
that the server wrote for it has reached the page. Then the Explore page itself on the small GPT, whose baseline is
measured: it is ready when the graph stands, which answers clicks from then on, and its charts follow. Its headline
strip says how many blocks are recomputed, and the bar beside a warm Run says the first thing that the worker reports:
what it does, as step n of m. Its slider is dragged to the least memory and back, and the time between two changes of
its figures is clocked. Every visit has an empty cache. On a server that has just started, the first graph is clicked in
the frame in which it stands, and the answer is clocked from the visit's request. Then two models of many blocks,
visited and clicked; the click's answer comes first, the chart follows.

    python -m benchmarks.page [clicks]
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "browser"), str(ROOT)]

from chromium import find  # noqa: E402
from served import GRAPH_PAGE, Served, launch, start  # noqa: E402

from explorer.view.text.plan import SLIDER  # noqa: E402

BUDGET_MS = {"click to confirmed": "150", "page ready": "3000", "Run to progress": "700", "click answered": "1200"}
MANY_MS = {
    300: {"click to confirmed": "150"},
    1_000: {"click to confirmed": "300", "graph": "8000", "timeline": "20000"},
}
"""Budgets of a model, by its number of blocks. A click that follows within 0.1 s has none."""
CHAIN = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()

    def forward(self, x):
        return x + self.act(self.linear(self.norm(x)))

def chain():
    return nn.Sequential(*(Layer() for _ in range({n_layers})), nn.Linear(16, 16)), torch.randn(8, 16)
"""
"""A model whose layers have three leaves each."""
FIGURES, PROGRESS = ".figure .value", '[data-testid="stProgress"]'
CHART = ".js-plotly-plot .main-svg"
TIMELINE = ".st-key-first :is(.main-svg, .sketch > svg)"
REPORTED = r"\(\d+ of [1-9]"
GPT = "/?model=sample_models%2Fgpt.py&size=small"
GRAPHS = {
    "24 blocks": "/?kind=gpt&n=6",
    "1,000 blocks, folded": "/?kind=many&n=125",
    "1,000 blocks, unfolded": "/?kind=wide&n=125",
}
WATCH = f"""(() => {{
    const painted = (window.painted = {{}})
    const hosts = () => [...document.querySelectorAll("#root *")].filter((e) => e.shadowRoot)
    const graph = () => hosts().some((e) => e.shadowRoot.querySelector('[role="treeitem"]'))
    const look = (now) => {{
        if (!painted.graph && graph()) painted.graph = now
        if (!painted.chart && document.querySelector("{CHART}")) painted.chart = now
        requestAnimationFrame(look)
    }}
    requestAnimationFrame(look)
}})()"""
"""Notes in the page when graph and chart are painted: a browser that runs Plotly answers no question from outside."""
ALIVE = """(() => {
    const look = (now) => {
        const roots = [...document.querySelectorAll("*")].map((e) => e.shadowRoot).filter(Boolean)
        const button = roots.map((root) => root.querySelector("[data-act=all]")).find(Boolean)
        const figures = roots.map((root) => [...root.querySelectorAll(".figure .value")].at(-1)).filter(Boolean)
        if (button && !window.clicked) (window.clicked = now), button.click()
        if (figures.some((e) => /^[1-9]/.test(e.textContent))) window.alive = performance.now()
        else requestAnimationFrame(look)
    }
    requestAnimationFrame(look)
})()"""
"""Clicks in the first graph that stands, and notes when the figures say so."""
EXPLORE_CLICK = """([selector, scope, wanted]) => new Promise((done) => {
    const host = [...document.querySelectorAll("*")].find((e) => e.shadowRoot?.querySelector(".graph"))
    const began = performance.now()
    window.redrawn = null
    window.redrawing?.disconnect()
    window.redrawing = new MutationObserver(() => { window.redrawn = performance.now() - began })
    for (const plot of document.querySelectorAll(".js-plotly-plot"))
        window.redrawing.observe(plot, { subtree: true, childList: true, attributes: true })
    const roots = () => [document, ...[...document.querySelectorAll("*")].map((e) => e.shadowRoot).filter(Boolean)]
    const there = () => roots().flatMap((root) => [...root.querySelectorAll(scope)])
    const said = () => there().some((e) => e.textContent.match(wanted))
    const look = () => (said() ? done(performance.now() - began) : requestAnimationFrame(look))
    requestAnimationFrame(look)
    const target = host.shadowRoot.querySelector(selector) ?? document.querySelector(selector)
    target.click()
})"""
CHANGES = """() => {
    const strip = [...document.querySelectorAll("*")].find((e) => e.shadowRoot?.querySelector(".figure .value"))
    const times = (window.changes = [performance.now()])
    const note = () => times.push(performance.now())
    new MutationObserver(note).observe(strip.shadowRoot, { subtree: true, childList: true })
}"""
"""Notes in the page when its figures change."""
DRAG_S = 2.0
CLICK = """([id, wanted]) => new Promise((done) => {
    const host = [...document.querySelectorAll("*")].find((e) => e.shadowRoot?.querySelector(".graph"))
    const texts = () => [...document.querySelectorAll('[data-testid="stText"]')]
    const said = () => texts().some((e) => e.innerText.includes(wanted))
    const began = performance.now()
    const look = new MutationObserver(() => said() && (look.disconnect(), done(performance.now() - began)))
    look.observe(document.body, { subtree: true, childList: true, characterData: true })
    host.shadowRoot.querySelector(`[data-id="${id}"]`).click()
})"""


IN_TURNS = """([ids, gap, wanted]) => new Promise((done) => {
    const roots = () => [...document.querySelectorAll("*")].map((e) => e.shadowRoot).filter(Boolean)
    const graph = roots().find((root) => root.querySelector(".graph"))
    const strip = roots().find((root) => root.querySelector(".figure .value"))
    const plot = document.querySelector(".st-key-first .js-plotly-plot")
    const at = { began: Infinity, figures: 0, painted: 0, line: 0 }
    const look = new MutationObserver(() => at.line || (at.line = performance.now()))
    let left = [...ids]
    const end = () => done([at.figures - at.began, at.painted - at.began, at.line - at.began])
    const seen = new MutationObserver(() => {
        const last = [...strip.querySelectorAll(".value")].at(-1)
        if (at.figures || left.length || !last?.textContent.match(wanted)) return
        at.figures = performance.now()
        requestAnimationFrame(() => setTimeout(() => {
            at.painted = performance.now()
        }))
    })
    seen.observe(strip, { subtree: true, childList: true, characterData: true })
    const click = () => {
        const id = left.shift()
        if (!left.length) at.began = performance.now()
        if (!left.length && plot) look.observe(plot, { subtree: true, childList: true, attributes: true })
        graph.querySelector(`[data-id="${id}"]`).click()
        left.length && setTimeout(click, gap)
    }
    click()
    const wait = setInterval(() => {
        if ((!at.painted || !at.line) && performance.now() - at.began < 8000) return
        clearInterval(wait)
        look.disconnect()
        seen.disconnect()
        end()
    }, 20)
})"""
"""Clicks blocks one after another; milliseconds from the last click to its figures, to their frame, and to the line."""
DRAG = """(ms) => new Promise((done) => {
    const roots = [...document.querySelectorAll("*")].map((e) => e.shadowRoot).filter(Boolean)
    const slider = roots.map((root) => root.querySelector("input[type=range]")).find(Boolean)
    const counts = { frames: 0, moves: 0, answers: 0, "longest frame, ms": 0 }
    const [send, began] = [window.fetch, performance.now()]
    let last = began
    window.fetch = async (...of) => {
        const answer = await send(...of)
        counts.answers += of[0] === "answer" && answer.status === 200
        return answer
    }
    const emit = (event) => slider.dispatchEvent(event)
    const frame = (now) => {
        counts.frames++
        counts["longest frame, ms"] = Math.max(counts["longest frame, ms"], now - last)
        last = now
        const share = (now - began) / ms
        if (share >= 1) {
            emit(new PointerEvent("pointerup", { bubbles: true, composed: true }))
            return setTimeout(() => { window.fetch = send; done(counts) }, 2000)
        }
        const place = Math.round(slider.max * Math.max(1 - 2 * share, 2 * share - 1))
        if (place !== Number(slider.value)) {
            counts.moves++
            slider.value = place
            emit(new Event("input", { bubbles: true, composed: true }))
        }
        requestAnimationFrame(frame)
    }
    emit(new PointerEvent("pointerdown", { bubbles: true, composed: true }))
    requestAnimationFrame(frame)
})"""
"""Drags the slider to its other end and back, a place a frame at most; counts frames, moves, and answers to moves."""


_sessions: dict[Any, Any] = {}
"""Sessions of the browser's inspector, by page."""


def in_turns(before: str, rounds: str, sizes: str) -> None:
    """Clicks, bursts and drags on this head and on the head in the folder `before`, in turns in one browser."""
    from playwright.sync_api import sync_playwright

    path = find()
    assert path is not None, "`make browser` installs a Chromium"
    heads = {"before": Path(before).resolve(), "now": ROOT}
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as home:
        browser = launch(playwright, path)
        for n_blocks in map(int, sizes.split(",")):
            model, apps, pages = Path(home) / f"chain_{n_blocks}.py", [], {}
            model.write_text(CHAIN.format(n_layers=n_blocks // 4))
            try:
                for name, root in heads.items():
                    arguments = ("--model", f"{model}:chain") if n_blocks in MANY_MS else ()
                    apps.append(start(root / "app.py", *arguments, home=Path(home), root=root))
                    url = f"/?model={model}:chain" if arguments else GPT
                    pages[name] = _unfolded(browser, apps[-1].url + url)
                _take_turns(pages, n_blocks, int(rounds))
            finally:
                for page in pages.values():
                    page.close()
                for app in apps:
                    app.process.terminate()
                    app.process.wait(timeout=60)
        browser.close()


def _unfolded(browser: Any, url: str) -> Any:
    """The measured page, with the folded run of its blocks open."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.set_default_timeout(400_000)
    page.goto(url)
    page.get_by_text("Measured with everything kept.").wait_for()
    page.wait_for_function("() => !/[?&]job=/.test(location.search)")
    page.get_by_role("slider", name=SLIDER).wait_for()
    page.wait_for_timeout(3000)
    page.locator('.row[aria-expanded="false"]:has(.cells) .fold').first.click()
    page.wait_for_timeout(3000)
    return page


def _take_turns(pages: dict[str, Any], n_blocks: int, rounds: int) -> None:
    figures: dict[tuple[str, str], list[float]] = {}
    ids = next(iter(pages.values())).locator(".row.toggles").evaluate_all("rows => rows.map((row) => row.dataset.id)")
    ids = [id for id in ids if id.split(".")[-1].isdigit()][:12]
    for i in range(rounds):
        for name, page in pages.items():
            for what, chosen in (("click", ids[i % 12 :][:1]), ("eight clicks", ids[:8] if i < 4 else [])):
                if not chosen:
                    continue
                for n_on in (len(chosen), 0):
                    wanted = rf"\b{n_on} (of \d+ )?block"
                    began = _cpu_ms(page)
                    sizes = page.evaluate(IN_TURNS, [chosen, 60, wanted])
                    page.wait_for_timeout(2500)
                    sizes.append(_cpu_ms(page) - began)
                    for sign, ms in zip(("figures", "painted", "line", "CPU of the page"), sizes, strict=True):
                        figures.setdefault((f"{what}: {sign}", name), []).append(ms)
    for _ in range(3):
        for name, page in pages.items():
            began = _cpu_ms(page)
            counts = page.evaluate(DRAG, 1000 * DRAG_S)
            for sign, n in (counts | {"CPU of the page": _cpu_ms(page) - began}).items():
                figures.setdefault((f"drag of {DRAG_S:g} s: {sign}", name), []).append(n)
    for (sign, name), values in sorted(figures.items()):
        _say(f"{n_blocks} blocks, {name}", sign, values)


def _cpu_ms(page: Any) -> float:
    """CPU time of the thread that draws the page: the load of the machine does not change it much."""
    if page not in _sessions:
        _sessions[page] = page.context.new_cdp_session(page)
        _sessions[page].send("Performance.enable", {"timeDomain": "threadTicks"})
    metrics = _sessions[page].send("Performance.getMetrics")["metrics"]
    return 1e3 * next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


def main(clicks: str = "20", before: str = "", sizes: str = "12,300,1000") -> None:
    if before:
        in_turns(before, clicks, sizes)
        return
    path = find()
    if path is None:
        sys.exit("No Chromium was found; `make browser` installs one.")
    from playwright.sync_api import sync_playwright

    print(f"{'graph':26} {'figure':22} {'median':>8} {'fastest':>8} {'slowest':>8} {'budget':>8}   ms")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as home:
        browser = launch(playwright, path)
        app = start(GRAPH_PAGE, home=Path(home))
        try:
            for name, query in GRAPHS.items():
                ready, answers = _measure(browser, app.url + query, int(clicks))
                _say(name, "page ready", ready)
                _say(name, "click to confirmed", answers)
        finally:
            app.process.terminate()
            app.process.wait(timeout=30)
        _living(browser)
        app = start(ROOT / "app.py", home=Path(home))
        try:
            _explore(browser, app, int(clicks))
        finally:
            app.process.terminate()
            app.process.wait(timeout=30)
        for n_blocks in MANY_MS:
            _many(browser, Path(home), n_blocks, int(clicks))
        browser.close()


def _measure(browser: Any, url: str, clicks: int) -> tuple[list[float], list[float]]:
    ready, answers = [], []
    for _ in range(3):
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        began = time.perf_counter()
        page.goto(url)
        page.get_by_role("treeitem").first.wait_for(timeout=60_000)
        ready.append(1000 * (time.perf_counter() - began))
        if len(ready) < 3:
            page.close()
    for i in range(clicks):
        wanted = "confirmed: head" if i % 2 == 0 else "confirmed: none"
        answers.append(page.evaluate(CLICK, ["head", wanted]))
        page.wait_for_timeout(100)
    page.close()
    return ready, answers


def _living(browser: Any) -> None:
    """The first visit of a server, clicked as soon as there is a graph, until Streamlit knows of the click."""
    signs: dict[str, list[float]] = {"graph drawn": [], "click answered": [], "click kept by the page": []}
    for _ in range(5):
        with tempfile.TemporaryDirectory() as home:
            app = start(ROOT / "app.py", home=Path(home))
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.add_init_script(ALIVE)
            page.goto(app.url, wait_until="commit")
            page.get_by_role("button", name="Undo").wait_for(timeout=60_000)
            times = page.evaluate("() => [window.clicked, window.alive, performance.now()]")
            for sign, ms in zip(signs, times, strict=True):
                signs[sign].append(ms)
            page.close()
            app.process.terminate()
            app.process.wait(timeout=30)
    for sign, ms in signs.items():
        _say("Explore, server just started", sign, ms)


def _explore(browser: Any, app: Served, clicks: int) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(app.url + GPT)
    page.get_by_text("Measured with everything kept.").wait_for(timeout=180_000)
    ready, drawn = [], []
    for _ in range(5):
        page.close()
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.add_init_script(WATCH)
        page.goto(app.url + GPT)
        page.wait_for_function("() => window.painted?.graph && window.painted.chart", timeout=60_000)
        painted = page.evaluate("() => window.painted")
        ready.append(painted["graph"])
        drawn.append(painted["chart"])
        page.wait_for_timeout(3000)
    _say("Explore, small GPT", "page ready", ready)
    _say("Explore, small GPT", "charts drawn", drawn)
    (answers, _), changes, began = _clicked(page, "head", clicks), _dragged(page), []
    still = [later - earlier for earlier, later in itertools.pairwise(changes)]
    for _ in range(3):
        began.append(page.evaluate(EXPLORE_CLICK, [".st-key-run button", PROGRESS, REPORTED]))
        # To its end: a cancelled run may end the worker, and the next one would find it cold.
        page.get_by_role("button", name="Cancel").wait_for(state="detached", timeout=180_000)
        page.wait_for_timeout(1000)
    _say("Explore, small GPT", "click to confirmed", answers)
    _say("Explore, small GPT", "figures while dragged", still)
    _say("Explore, small GPT", "Run to progress", began)
    page.close()


def _many(browser: Any, home: Path, n_blocks: int, clicks: int) -> None:
    """The first visit to a model of many blocks, and clicks once it is measured."""
    n_layers, model = n_blocks // 4, home / f"chain_{n_blocks}.py"
    model.write_text(CHAIN.format(n_layers=n_layers))
    app = start(ROOT / "app.py", "--model", f"{model}:chain", home=home)
    try:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(180_000)
        began, signs = time.perf_counter(), {}
        page.goto(f"{app.url}/?model={model}:chain")
        for sign, place in {"graph": page.get_by_role("treeitem"), "timeline": page.locator(TIMELINE)}.items():
            place.first.wait_for()
            signs[sign] = 1000 * (time.perf_counter() - began)
        page.get_by_text("Measured with everything kept.").wait_for()
        page.wait_for_function("() => !/[?&]job=/.test(location.search)")
        page.wait_for_timeout(3000)
        signs["click to confirmed"], signs["click to chart"] = _clicked(page, str(n_layers), clicks, pause_ms=2500)
        signs["the next click"], _ = _clicked(page, str(n_layers), clicks)
        for sign, ms in signs.items():
            _say(f"Explore, {n_blocks:,} blocks", sign, ms if isinstance(ms, list) else [ms], MANY_MS[n_blocks])
        page.close()
    finally:
        app.process.terminate()
        app.process.wait(timeout=30)


def _clicked(page: Any, block: str, clicks: int, *, pause_ms: int = 100) -> tuple[list[float], list[float]]:
    """Milliseconds from each click on `block` to the headline strip's answer, and to the chart's. A short pause leaves
    the browser no time to draw charts."""
    answers, charts = [], []
    for i in range(clicks - clicks % 2):  # the block is left as it was found
        wanted = rf"\b{(i + 1) % 2} (of \d+ )?block"
        answers.append(page.evaluate(EXPLORE_CLICK, [f'[data-id="{block}"]', FIGURES, wanted]))
        page.wait_for_timeout(pause_ms)
        if (redrawn_ms := page.evaluate("() => window.redrawn")) is not None:
            charts.append(redrawn_ms)
    return answers, charts


def _dragged(page: Any) -> Any:
    """When the figures change while the slider is dragged to its other end and back."""
    page.wait_for_timeout(1000)
    box = page.get_by_role("slider", name=SLIDER).bounding_box()
    page.evaluate(CHANGES)
    at, began = box["x"] + box["width"] - 8, time.perf_counter()
    page.mouse.move(at, box["y"] + box["height"] / 2)
    page.mouse.down()
    while (share := (time.perf_counter() - began) / DRAG_S) < 1:
        page.mouse.move(at - (box["width"] - 16) * min(2 * share, 2 - 2 * share), box["y"] + box["height"] / 2)
        page.wait_for_timeout(15)
    noted = page.evaluate("() => window.changes")
    page.mouse.up()
    page.wait_for_timeout(1000)
    return noted


def _say(graph: str, figure: str, ms: list[float], budgets: dict[str, str] = BUDGET_MS) -> None:
    print(
        f"{graph:26} {figure:22} {statistics.median(ms):8.0f} {min(ms):8.0f} {max(ms):8.0f} "
        f"{budgets.get(figure, ''):>8}",
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
