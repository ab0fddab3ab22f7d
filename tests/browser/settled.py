"""Waits until Streamlit has drawn everything: a press while a page is drawn anew may meet an element that goes away."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

STILL_MS = 300
"""A rerun asked for by the last one, and what components/desk.js tells at rest, begins within this time."""
DROPPED_MS = 20_000
"""A request that has no answer so late was dropped: Streamlit says nothing where a rerun has removed the fragment."""
WATCH_SOCKET = """
    globalThis.asked = globalThis.answered = 0
    const send = WebSocket.prototype.send
    WebSocket.prototype.send = function (...data) {
        if (!this.watched) this.addEventListener("message", () => { answered = performance.now() })
        this.watched = true
        asked = performance.now()
        return send.apply(this, data)
    }
"""
"""Runs first in each page: notes when the page last asked the server for a rerun, and when the server last spoke."""
IS_STILL = """([since, still, dropped]) => {
    const running = document.querySelector('[data-testid="stApp"]')?.dataset.testScriptState !== "notRunning"
    const stale = document.querySelector('[data-stale="true"]') !== null
    const now = performance.now()
    const waits = globalThis.asked >= globalThis.answered && now - globalThis.asked < dropped
    if (running || stale || waits) since.at = now
    return now - since.at > still
}"""


def settled(page: Page, *, still_ms: int = STILL_MS) -> Page:
    """The page once the server has answered, no script runs and no element waits to be replaced, for `still_ms`."""
    since = page.evaluate_handle("() => ({at: performance.now()})")
    page.wait_for_function(IS_STILL, arg=[since, still_ms, DROPPED_MS])
    return page


def press(page: Page, target: Locator) -> None:
    """Clicks on a page that has settled. The click is one event: between the two of a mouse, plans that arrive may move
    the target."""
    settled(page)
    target.click(trial=True)
    target.dispatch_event("click")
