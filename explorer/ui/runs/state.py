"""State of the Runs page for one visitor: the selected run, the uploaded files, the messages to show."""

from __future__ import annotations

from dataclasses import dataclass, field

from explorer.ui.session.kept import kept


@dataclass(slots=True, kw_only=True)
class RunsState:
    """Changed in place, as the page is drawn again and again."""

    order: int = 0
    """Number of changes of the rows. A new number makes a new table, in which only `select` is selected."""
    select: str | None = None
    """Id of the run that the next table begins with."""
    done: str = ""
    """Message on the last action, until it is shown."""
    error: str = ""
    """Reason why the last action failed, until it is shown."""
    taken: set[str] = field(default_factory=set)
    """Ids of the uploaded files that were added already."""


def current() -> RunsState:
    """This visitor's state."""
    return kept("runs", RunsState, RunsState)


def reorder(select: str | None = None) -> None:
    """The rows are others now: no selected row must become another run. `select`: the run that is selected then."""
    state = current()
    state.order, state.select = state.order + 1, select
