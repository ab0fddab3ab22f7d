"""One box a hazard, as bad as it is, with its remedy and its blocks; without any it says so."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest

SCRIPT = """
import streamlit as st
from explorer.record import Hazard
from explorer.ui.shared.hazards import hazards_panel
wrong = Hazard(rule="r", severity="error", blocks=("a", "b"), sentence="It *breaks*.", remedy="Do not.")
note = Hazard(rule="s", severity="note", blocks=(), sentence="By the way.", remedy="Nothing.")
hazards_panel((wrong, note) if st.session_state.get("any", True) else ())
"""


def test_severity_sentence_remedy_and_blocks() -> None:
    at = AppTest.from_string(SCRIPT).run()
    assert not at.exception
    assert [text.value for text in at.text] == [
        "It *breaks*.\nRemedy: Do not.\nBlocks: a, b",
        "By the way.\nRemedy: Nothing.\nBlocks: all",
    ]
    badges = " ".join(markdown.value for markdown in at.markdown)
    assert "red-badge[error]" in badges and "gray-badge[note]" in badges


def test_none_is_said() -> None:
    at = AppTest.from_string(SCRIPT)
    at.session_state["any"] = False
    assert [caption.value for caption in at.run().caption] == ["No known hazard in this policy on this model."]
