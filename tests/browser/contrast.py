"""Contrast of every word that a page shows, as the browser has drawn it: its colour against all grounds below it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.browser.settled import settled

if TYPE_CHECKING:
    from playwright.sync_api import Page

ENOUGH, ENOUGH_OF_SIGNS = 4.5, 3.0
"""WCAG 2.2, 1.4.3 for text and 1.4.11 for signs. What is disabled is exempt there, and here."""
TOOLTIP_MS = 400
"""Time within which a tooltip stands: its words are measured too."""
SCRIPT = (Path(__file__).resolve().parent / "contrast.js").read_text(encoding="utf-8")
MEASURE = f"() => document.querySelector('[data-stale=\"true\"]') ? null : ({SCRIPT})()"
"""Gives null while a part of the page waits to be replaced: the part is faded then."""


def too_faint(page: Page) -> list[str]:
    """Each text below the contrast it needs, with its ratio and its two colours."""
    words = None
    while words is None:
        words = settled(page, still_ms=TOOLTIP_MS).evaluate(MEASURE)
    assert words, "no text was found on the page"
    return sorted(
        {
            f"{word['ratio']:.2f} {word['text']!r}: {word['ink']} on {word['ground']}"
            for word in words
            if not word["disabled"] and word["ratio"] < (ENOUGH_OF_SIGNS if word["sign"] else ENOUGH)
        }
    )
