"""Where the rows become others, a new table begins, with at most the one run selected that was named."""

from __future__ import annotations

from typing import Any

import pytest
import streamlit as st

from explorer.ui.runs.state import current, reorder


def test_each_new_order_is_a_new_table(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[str, Any] = {}
    monkeypatch.setattr(st, "session_state", held)
    assert (current().order, current().select) == (0, None)
    reorder("a")
    assert (current().order, current().select) == (1, "a")
    reorder()
    assert (current().order, current().select) == (2, None)
