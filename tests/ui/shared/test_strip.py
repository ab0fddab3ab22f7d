"""A strip is as many figures as it was given, in one row or in rows of three, and as high without words below."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest

SCRIPT = """
import streamlit as st
from explorer.ui.session import window
from explorer.ui.shared.strip import Cell, strip
origins = ["", *["measured"] * 4]
cells = [Cell(label=f"Figure {i}", value=f"{i} MiB", help="What it is.", below=origins[i]) for i in range(5)]
narrow = window.narrow
window.narrow = lambda: st.session_state["narrow"]
strip(tuple(cells))
window.narrow = narrow
"""


@pytest.mark.parametrize("narrow", [False, True])
def test_every_figure_stands_with_where_it_comes_from(narrow: bool) -> None:
    at = AppTest.from_string(SCRIPT)
    at.session_state["narrow"] = narrow
    at.run()
    assert not at.exception
    assert [(metric.label, metric.value) for metric in at.metric] == [(f"Figure {i}", f"{i} MiB") for i in range(5)]
    assert [caption.value.strip() for caption in at.caption] == ["", *["measured"] * 4]
