"""The browser's window, as far as whoever lays out a page or a drawing has to know it."""

from __future__ import annotations

from explorer.record.base import Record


class Window(Record):
    """What a page is laid out for."""

    height: int
    """Pixels."""
    narrow: bool
    """Whether there is no room for two columns."""
    known: bool
    """False: this is a guess."""
