"""Expanders that stay as a person left them: Streamlit forgets expanders hidden behind another tab or page."""

from __future__ import annotations

from typing import Any

import streamlit as st


def fold(title: str, *, key: str, icon: str | None = None, expanded: bool = False) -> Any:
    """An expander; `expanded` is its state until a person opens or closes it."""
    left: dict[str, bool] = st.session_state.setdefault("folds", {})

    def note() -> None:
        left[key] = bool(st.session_state[key])

    return st.expander(title, left.get(key, expanded), key=key, icon=icon, on_change=note)
