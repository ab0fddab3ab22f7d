"""A run for somebody else: a report and its charts, where it has one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from explorer.jobs.store import Store
from explorer.ui.shared.reports import report_bytes
from tests.ui.runs.listing import saved, select
from tests.view import reports as kinds


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_kind_of_run_has_a_report_there(kind: str, runs_page: Callable[..., AppTest], store: Store) -> None:
    run_id = store.save(kinds.KINDS[kind], "mine")
    assert "Report" in [button.label for button in runs_page(0).get("download_button")]
    assert "<h1>mine</h1>" in report_bytes(run_id).decode()


def test_a_report_is_there_for_runs_that_have_one(runs_page: Callable[..., AppTest], store: Store) -> None:
    run_id = saved(store)
    at = select(runs_page(), 0)
    assert [button.label for button in at.get("download_button")] == ["Export", "Report"]
    text = report_bytes(run_id).decode()
    assert "mine" in text and "104.5 → 34.5 MiB" in text
