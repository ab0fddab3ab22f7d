"""Widgets that show and change a record. The record has the true value; a widget that differs is replaced.

    a person chooses ──▶ callback: the record changes before the page is drawn ──▶ the same widget, same value
    undo, a link, an import, another model, a refused number ──▶ the record differs from the widget
    ──▶ another widget takes its place, with the record's value

The new widget has a new key because the browser owns the value of an existing widget. The browser would send the old
value back, even from a closed popover.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import streamlit as st


class Bound(NamedTuple):
    """Arguments of a widget: its key, the record's value as its default, and the callback for a choice."""

    key: str
    value: Any
    on_change: Callable[[], None]

    @property
    def wired(self) -> dict[str, Any]:
        """Key and callback as the widget takes them: `st.toggle(label, shown.value, **shown.wired)`."""
        return {"key": self.key, "on_change": self.on_change}


def bound(name: str, value: Any, take: Callable[[Any], object]) -> Bound:
    """Arguments of a widget that shows the record's `value`; `take` writes a person's choice into the record."""
    told: dict[str, tuple[int, Any]] = st.session_state.setdefault("bound", {})
    n, shown = told.get(name, (0, value))
    n += shown != value
    told[name] = (n, value)
    key = f"{name}~{n}" if n else name

    def changed() -> None:
        chosen = st.session_state[key]
        # Streamlit also calls when a browser first echoes the default; a replaced widget is ignored.
        if told[name] == (n, chosen) or told[name][0] != n:
            return
        told[name] = (n, chosen)
        take(chosen)

    return Bound(key, value, changed)
