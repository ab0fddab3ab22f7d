"""The page of a small model on its way: what several tests of it begin with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.browser.settled import press, settled

if TYPE_CHECKING:
    from playwright.sync_api import Page

ANSWERED = re.compile(r"; gradients (?!not (compared|safe))")
"""The headline of a policy that was measured."""
APP = Path(__file__).resolve().parent.parent.parent / "app.py"


def measured(page: Page, url: str) -> Page:
    """Once the baseline of the model is measured and drawn."""
    page.goto(url)
    page.get_by_text("Measured with everything kept.").wait_for()
    page.get_by_test_id("stPlotlyChart").first.wait_for()
    return settled(page)


def compared(page: Page) -> None:
    """Recomputes all layers and waits for the comparison."""
    page.locator('[data-id="layers"]').get_by_role("button", name="Recompute all").click()
    press(page, page.get_by_role("button", name="Run", exact=True))
    page.get_by_text(ANSWERED).wait_for()
    page.wait_for_function("() => !location.search.includes('job=')")  # the store may have shown an earlier run of it
    page.get_by_test_id("stPlotlyChart").first.wait_for()
