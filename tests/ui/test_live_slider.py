"""A move of the slider is taken over once, by whoever is called first: the slider or the button that overrules it."""

from __future__ import annotations

from streamlit.testing.v1 import AppTest


def page() -> None:
    import streamlit as st

    from explorer.ui import live_slider

    moved = st.session_state.setdefault("moved", [])
    st.session_state.setdefault("slider, drawn", live_slider._Drawn(moved.append, 3))
    st.session_state["slider"] = {"at": st.session_state.get("sent")}
    live_slider.catch_up("slider")
    live_slider.catch_up("nowhere")


def test_a_move_is_taken_over_once() -> None:
    at = AppTest.from_function(page).run()
    assert not at.exception and at.session_state["moved"] == []
    for place, n, moves in ((2, 10, [2]), (2, 10, [2]), (0, 11, [2, 0]), (1, 10, [2, 0]), (3, 12, [2, 0])):
        at.session_state["sent"] = {"place": place, "n": n}
        at.run()
        assert at.session_state["moved"] == moves
