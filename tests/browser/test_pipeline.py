"""Pipeline splits in a real browser: stages, a cut by click and by key, a real run, every gradient compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.measured import stacks_when_narrow
from tests.browser.served import Served
from tests.browser.settled import press, settled

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

ROOT = Path(__file__).resolve().parent.parent.parent
N_GRADIENTS = 4 * 4 + 2


@pytest.fixture
def pipeline(page: Page, app: Served) -> Page:
    """The page once the blocks of the tiny model are priced."""
    page.goto(app.url + "/pipeline")
    page.get_by_role("treeitem").first.wait_for()
    page.get_by_text("Drawn from the price of each block.").wait_for()
    return settled(page)


def value(page: Page, label: str) -> Locator:
    """The figure under `label` in the strip."""
    return page.locator(".figure").filter(has_text=label).locator(".value")


def says(page: Page, label: str, text: str) -> None:
    value(page, label).get_by_text(text, exact=True).wait_for()


def test_cut_run_and_compare_every_gradient(pipeline: Page) -> None:
    page = pipeline
    says(page, "Plan", "2 stages")
    says(page, "Gradients", "not compared")
    stages = page.get_by_label("Stages", exact=True)
    stages.fill("3")
    stages.press("Enter")
    says(page, "Plan", "3 stages")
    assert settled(page).locator('[data-cut][aria-checked="true"]').count() == 2

    free = page.locator('[data-cut][aria-checked="false"]').first
    name = free.get_attribute("data-cut")
    press(page, free)
    says(page, "Plan", "4 stages")
    line = page.locator(f'[data-cut="{name}"]')
    settled(page)
    line.focus()
    page.keyboard.press("Enter")
    says(page, "Plan", "3 stages")

    page.locator('[data-id="layers.1"] .chip').click()
    page.get_by_text("1 block recomputed").wait_for()
    press(page, page.get_by_test_id("stButton").get_by_role("button", name="Run"))
    says(page, "Gradients", f"{N_GRADIENTS} of {N_GRADIENTS}")
    page.get_by_text("measured").locator("visible=true").first.wait_for()

    press(page, page.get_by_role("tab", name="Calls"))
    page.get_by_text("at most 2 runs for each forward call").wait_for()

    page.reload()
    says(page, "Plan", "3 stages")
    says(page, "Gradients", f"{N_GRADIENTS} of {N_GRADIENTS}")
    page.locator('[data-id="layers.1"][aria-checked="true"]').wait_for()
    stacks_when_narrow(page, "pipeline_results")
