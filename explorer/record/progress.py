"""How far long work has come. An engine verb calls its `Report`; that call raises Cancelled where a person did."""

from __future__ import annotations

from collections.abc import Callable

from explorer.record.base import Record
from explorer.record.plan import Plan


class Progress(Record):
    """`done` of `total` steps; `what` is the step under way, in words for a person."""

    what: str
    done: int
    total: int
    plans: tuple[Plan, ...] = ()
    """Found so far, by work that finds one after another."""


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """A Report for nobody."""
