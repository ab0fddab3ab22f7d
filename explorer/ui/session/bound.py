"""Widgets that show a record and change it: the record owns the truth, and a widget lives as long as it tells it.

    a person chooses ──▶ callback: the record is changed, before anything is drawn ──▶ the same widget, same value
    undo, a link, an import, another model, a number that was refused ──▶ the record says something else than the
    widget ──▶ another widget takes its place, with the record's value

Another widget, by its key, because the browser owns the value of the one that it has: it would send an old value back,
from a popover that is closed too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import streamlit as st


class Bound(NamedTuple):
    """What a widget is given: its key, the record's value as its default, and what to do with a choice."""

    key: str
    value: Any
    on_change: Callable[[], None]

    @property
    def wired(self) -> dict[str, Any]:
        """Key and callback as the widget takes them: `st.toggle(label, shown.value, **shown.wired)`."""
        return {"key": self.key, "on_change": self.on_change}


def bound(name: str, value: Any, take: Callable[[Any], object]) -> Bound:
    """For a widget that shows the record's `value`; `take` writes into the record what a person chooses."""
    told: dict[str, tuple[int, Any]] = st.session_state.setdefault("bound", {})
    n, shown = told.get(name, (0, value))
    n += shown != value
    told[name] = (n, value)
    key = f"{name}~{n}" if n else name

    def changed() -> None:
        chosen = st.session_state[key]
        # Streamlit also calls when a browser first tells what it was given; one that was replaced has nothing to say.
        if told[name] == (n, chosen) or told[name][0] != n:
            return
        told[name] = (n, chosen)
        take(chosen)

    return Bound(key, value, changed)
