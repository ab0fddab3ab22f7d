"""Widgets that take a value and give one back: records own the truth, widgets only show it."""

from __future__ import annotations

from typing import Any

import streamlit as st


def show(key: str, value: Any) -> str:
    """Makes the widget `key` show `value` where the record changed; what a person has just chosen stands.

    Returns `key`.
    """
    shown = st.session_state.setdefault("shown_values", {})
    chosen = key in st.session_state and shown.get(key, value) == value
    # Set on every run: a widget in a closed popover is made by the browser later, and would show its default then.
    st.session_state[key] = st.session_state[key] if chosen else value
    shown[key] = value
    return key


def taken(key: str, value: Any) -> None:
    """In the callback of the widget `key`: what was chosen there made the record `value`."""
    st.session_state[key] = value
    st.session_state["shown_values"][key] = value
