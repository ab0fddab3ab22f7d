"""Widgets that take a value and give one back: records own the truth, widgets only show it."""

from __future__ import annotations

from typing import Any

import streamlit as st


def show(key: str, value: Any) -> str:
    """Makes the widget `key` show `value` where the record changed; what a person has just chosen stands.

    Returns `key`.
    """
    shown = st.session_state.setdefault("shown_values", {})
    if key not in st.session_state or shown.get(key, value) != value:
        st.session_state[key] = value
    shown[key] = value
    return key
