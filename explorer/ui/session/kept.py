"""What one visitor's session keeps from one run of a page to the next: one object of one class under each name.

Streamlit loads the code anew when a file of it changed, and the session goes on with objects of the classes that were.
They are carried over field by field: a field that is new has its default, and what fits no more starts afresh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import streamlit as st

from explorer.errors import ExplorerError
from explorer.record.base import from_plain, to_plain

T = TypeVar("T")


def kept(name: str, kind: type[T], first: Callable[[], T]) -> T:
    """The visitor's object under `name`; on the first visit what `first` makes."""
    held = st.session_state.get(name)
    if type(held) is kind:
        return held
    renewed = carried_over(held, kind) if held is not None else None
    st.session_state[name] = renewed if renewed is not None else first()
    return kept(name, kind, first)


def carried_over(held: object, kind: type[T]) -> T | None:
    """`held`, which an earlier form of the code made, as a `kind`; None where its fields do not fit."""
    try:
        return from_plain(to_plain(held), kind)
    except (ExplorerError, TypeError, AttributeError):
        return None
