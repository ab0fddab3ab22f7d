"""How fast the page answers in a real Chromium: click to confirmed toggle, and the page once the server answers.

Three graphs: 24 blocks, and 1,000 blocks folded as they are at first, and unfolded. A click is confirmed when the text
that the server wrote for it has reached the page.

    python -m benchmarks.page [clicks]
"""

from __future__ import annotations

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

BUDGET_MS = {"click to confirmed": 150.0, "page ready": 3000.0}
GRAPHS = {"24 blocks": ("gpt", "6"), "1,000 blocks, folded": ("many", "125"), "1,000 blocks, unfolded": ("wide", "125")}
CLICK = """([id, wanted]) => new Promise((done) => {
    const host = [...document.querySelectorAll("*")].find((e) => e.shadowRoot?.querySelector(".graph"))
    const texts = () => [...document.querySelectorAll('[data-testid="stText"]')]
    const said = () => texts().some((e) => e.innerText.includes(wanted))
    const began = performance.now()
    const look = new MutationObserver(() => said() && (look.disconnect(), done(performance.now() - began)))
    look.observe(document.body, { subtree: true, childList: true, characterData: true })
    host.shadowRoot.querySelector(`[data-id="${id}"]`).click()
})"""


def main(clicks: str = "20") -> None:
    path = find()
    if path is None:
        sys.exit("No Chromium was found; `make browser` installs one.")
    from playwright.sync_api import sync_playwright

    print(f"{'graph':26} {'figure':20} {'median':>8} {'fastest':>8} {'slowest':>8} {'budget':>8}   ms")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as home:
        browser = launch(playwright, path)
        for name, arguments in GRAPHS.items():
            app = start(GRAPH_PAGE, *arguments, home=Path(home))
            try:
                ready, answers = _measure(browser, app, int(clicks))
            finally:
                app.process.terminate()
                app.process.wait(timeout=30)
            _say(name, "page ready", ready)
            _say(name, "click to confirmed", answers)
        browser.close()


def _measure(browser: Any, app: Served, clicks: int) -> tuple[list[float], list[float]]:
    ready, answers = [], []
    for _ in range(3):
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        began = time.perf_counter()
        page.goto(app.url)
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


def _say(graph: str, figure: str, ms: list[float]) -> None:
    print(
        f"{graph:26} {figure:20} {statistics.median(ms):8.0f} {min(ms):8.0f} {max(ms):8.0f} {BUDGET_MS[figure]:8.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
