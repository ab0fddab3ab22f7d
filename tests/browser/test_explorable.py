"""A page that answers without a server: its forecast is the forecaster's, to the byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from explorer.record import Policy
from tests.browser import forecasts_in_page as both

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.mark.parametrize("name", both.MODELS)
def test_a_page_forecasts_as_the_forecaster_does(page: Page, name: str) -> None:
    chosen = [Policy(), *(policy for kind in both.KINDS for policy in both.policies(name, kind, 4))]
    for observed in (True, False):
        forecaster = both.open_step(page, name, observed=observed)
        wrong = [fault for policy in chosen for fault in both.faults(page, forecaster, policy)]
        assert not wrong, "\n".join(wrong)
