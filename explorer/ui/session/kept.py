"""Objects that a visitor's session keeps between runs of a page: one object of one class under each name.

Streamlit reloads a changed file, and the session still has objects of the old classes. Such objects are copied field
by field. A new field has its default; an object that does not fit starts afresh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import streamlit as st

from explorer.errors import ExplorerError
from explorer.record.base import from_plain, to_plain

T = TypeVar("T")


def kept(name: str, kind: type[T], first: Callable[[], T]) -> T:
    """The visitor's object under `name`; on the first visit `first` makes the object."""
    held = st.session_state.get(name)
    if type(held) is kind:
        return held
    renewed = carried_over(held, kind) if held is not None else None
    st.session_state[name] = renewed if renewed is not None else first()
    return kept(name, kind, first)


def carried_over(held: object, kind: type[T]) -> T | None:
    """`held`, an object of older code, as a `kind`; None if its fields do not fit."""
    try:
        return from_plain(to_plain(held), kind)
    except (ExplorerError, TypeError, AttributeError):
        return None
