"""A model without blocks and without a backward on the real page; tests/ui/test_plain_models.py opens ten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from explorer.ui.explore.results import TABS
from tests.browser.conftest import PLAIN
from tests.browser.served import Served
from tests.browser.settled import press, settled

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_a_model_of_buffers_alone_raises_in_no_tab(page: Page, app: Served) -> None:
    page.goto(f"{app.url}/?model={PLAIN}:buffers_only")
    page.get_by_text("The run trains nothing").first.wait_for()
    for tab in TABS[1:]:
        press(page, page.get_by_role("tab", name=tab, exact=True))
        assert settled(page).get_by_test_id("stException").count() == 0
        assert page.get_by_role("tab").all_inner_texts() == TABS
