"""The pictures at the top of the README, taken from the real page: the loop as a film, and one scene of it as a still.

see -> toggle -> run -> compare -> take away, on the small GPT. Captions and pointer are laid over the page; every
figure is the page's own.

    make film
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from explorer.view.text.plan import SLIDER  # noqa: E402
from tests.browser.chromium import find  # noqa: E402
from tests.browser.measured import ANSWERED  # noqa: E402
from tests.browser.served import ROOT, launch, start  # noqa: E402
from tests.browser.settled import WATCH_SOCKET, press, settled  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

FILM, STILL = HERE / "loop.webp", HERE / "explore.png"
SIZE = {"width": 1280, "height": 800}
MOST_BYTES = 1_500_000
COMPARED = 5
"""Number of the scene that the still shows."""
CAPTION = """(words) => {
    const band = document.getElementById("film-caption") ?? document.body.appendChild(document.createElement("div"))
    band.id = "film-caption"
    band.textContent = words
    band.style = `position: fixed; top: 8px; right: 56px; z-index: 1000000; padding: 6px 16px; border-radius: 16px;
        background: #1a4f8a; color: white; font: 600 17px "Source Sans", sans-serif`
}"""
POINTER = """([x, y]) => {
    const dot = document.getElementById("film-pointer") ?? document.body.appendChild(document.createElement("div"))
    dot.id = "film-pointer"
    dot.style = `position: fixed; left: ${x - 17}px; top: ${y - 17}px; width: 34px; height: 34px; border-radius: 50%;
        z-index: 1000001; background: #f59e0b66; border: 3px solid #d97706; pointer-events: none;
        box-sizing: border-box; display: ${x < 0 ? "none" : "block"}`
}"""

Scene = tuple[bytes, int]
"""A picture (PNG) and how long it stands, in milliseconds."""


def scenes(page: Page) -> Iterator[Scene]:
    """The loop, each step before and after its click."""
    yield _shot(settled(page), "1 · See which blocks hold the memory", 2600)
    every = page.locator('[data-id="blocks"]').get_by_role("button", name="Recompute all")
    yield _pointed(page, every, "2 · Toggle blocks: recompute instead of keep")
    every.click()
    page.locator(".figure .value").get_by_text("≈").first.wait_for()
    yield _shot(settled(page), "2 · The forecast answers at once", 2600)
    run = page.locator(".st-key-run button:visible")
    yield _pointed(page, run, "3 · Run real training steps of both")
    settled(page)
    run.click()
    page.get_by_test_id("stProgress").wait_for()
    yield _shot(page, "3 · Run real training steps of both", 1300)
    page.get_by_text(ANSWERED).wait_for()
    page.wait_for_function("() => !location.search.includes('job=')")  # its times, too
    _planned(page)
    yield _shot(settled(page), "4 · Compare: memory, cost, gradients", 3400)
    for tab, words, answer in (
        ("Cost", "4 · What it costs, block by block", '[data-testid="stPlotlyChart"]'),
        ("Gradients", "4 · Is it still the same gradient?", ".st-key-seal"),
    ):
        press(page, page.get_by_role("tab", name=tab))
        page.locator(answer).first.wait_for()
        yield _shot(settled(page), words, 2600)
    press(page, page.get_by_role("tab", name="Memory"))
    press(page, page.get_by_role("button", name="Policy file"))
    page.get_by_role("button", name="Download (YAML)").wait_for()
    yield _shot(settled(page), "5 · Take the policy to your training script", 3400)


def _planned(page: Page) -> None:
    """Waits for all plans of the slider. The pointer rests where it shows no help."""
    page.mouse.move(4, 300)
    page.get_by_role("slider", name=SLIDER).wait_for()
    page.get_by_text("Finding plans").wait_for(state="hidden")


def _shot(page: Page, words: str, stands_ms: int, at: tuple[float, float] = (-1, -1)) -> Scene:
    page.evaluate(CAPTION, words)
    page.evaluate(POINTER, list(at))
    return page.screenshot(animations="disabled"), stands_ms


def _pointed(page: Page, target: Locator, words: str) -> Scene:
    settled(page)
    box = target.bounding_box()
    assert box is not None
    return _shot(page, words, 1100, (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2))


def film(taken: list[Scene]) -> bytes:
    """An animated WebP that begins anew after its last scene."""
    pictures = [Image.open(io.BytesIO(png)).convert("RGB") for png, _ in taken]
    file = io.BytesIO()
    pictures[0].save(
        file, "WEBP", save_all=True, append_images=pictures[1:], duration=[ms for _, ms in taken], loop=0, quality=85,
        method=6,
    )  # fmt: skip
    return file.getvalue()


def main() -> None:
    path = find()
    if path is None:
        sys.exit("No Chromium was found; `make browser` installs one.")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        app = start(ROOT / "app.py", home=Path(home))
        try:
            browser = launch(playwright, path)
            page = browser.new_page(viewport=SIZE)
            page.add_init_script(WATCH_SOCKET)
            page.set_default_timeout(120_000)
            page.goto(f"{app.url}/?model=sample_models%2Fgpt.py&size=small")
            page.get_by_text("Measured with everything kept.").wait_for()
            press(page, page.get_by_role("button", name="Not now"))
            _planned(page)
            taken = list(scenes(page))
            browser.close()
        finally:
            app.process.terminate()
            app.process.wait(timeout=30)
    moving = film(taken)
    if len(moving) > MOST_BYTES:
        sys.exit(f"The film has {len(moving):,} bytes; {MOST_BYTES:,} are enough for a README.")
    FILM.write_bytes(moving)
    STILL.write_bytes(taken[COMPARED][0])
    print(f"{FILM.relative_to(ROOT)}: {len(taken)} scenes, {len(moving):,} bytes")


if __name__ == "__main__":
    main()
