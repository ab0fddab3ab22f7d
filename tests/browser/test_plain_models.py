"""A model without blocks and without a backward on the real page; tests/ui/test_plain_models.py opens nine more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from explorer.ui.explore.results import TABS
from tests.browser.measured import APP
from tests.browser.settled import press, settled

if TYPE_CHECKING:
    from playwright.sync_api import Page

MODELS = Path(__file__).resolve().parents[1] / "ui" / "plain_models.py"


def test_a_model_of_buffers_alone_raises_in_no_tab(page: Page, serve: Callable[..., object]) -> None:
    page.goto(serve(APP, f"--model={MODELS}:buffers_only").url)  # type: ignore[attr-defined]
    page.get_by_text("The run trains nothing").first.wait_for()
    for tab in TABS[1:]:
        press(page, page.get_by_role("tab", name=tab, exact=True))
        assert settled(page).get_by_test_id("stException").count() == 0
        assert page.get_by_role("tab").all_inner_texts() == TABS
