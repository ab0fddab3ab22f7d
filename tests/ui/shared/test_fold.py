"""An expander stands as it was left, also where it was not drawn in between."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest


def page() -> None:
    import streamlit as st

    from explorer.ui.shared.fold import fold

    if st.session_state.get("tab", "first") == "first":
        st.session_state["stands"] = fold("Why", key="why").open
        st.session_state["other"] = fold("Known", key="known", expanded=True).open


def test_it_stays_as_it_was_left() -> None:
    at = AppTest.from_function(page).run()
    assert (at.session_state["stands"], at.session_state["other"]) == (False, True)
    at.session_state["folds"]["why"] = True  # what the callback notes
    at.session_state["tab"] = "second"
    at.run()
    at.session_state["tab"] = "first"
    at.run()
    assert not at.exception
    assert (at.session_state["stands"], at.session_state["other"]) == (True, True)
