"""Waits until Streamlit has drawn everything: a press while a page is drawn anew may meet an element that goes away."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

STILL_MS = 400
"""A rerun asked for by the last one begins within this time."""
IS_STILL = """([since, still]) => {
    const running = document.querySelector('[data-testid="stApp"]')?.dataset.testScriptState !== "notRunning"
    const stale = document.querySelector('[data-stale="true"]') !== null
    if (running || stale) since.at = performance.now()
    return performance.now() - since.at > still
}"""


def settled(page: Page, *, still_ms: int = STILL_MS) -> Page:
    """The page once no script runs and no element waits to be replaced, for `still_ms`."""
    since = page.evaluate_handle("() => ({at: performance.now()})")
    page.wait_for_function(IS_STILL, arg=[since, still_ms])
    return page


def press(page: Page, target: Locator) -> None:
    """Clicks on a page that has settled."""
    settled(page)
    target.click()
