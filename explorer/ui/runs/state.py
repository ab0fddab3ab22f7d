"""State of the Runs page for one visitor: the selected run, the uploaded files, the messages to show."""

from __future__ import annotations

from dataclasses import dataclass, field

from explorer.ui.session.kept import kept


@dataclass(slots=True, kw_only=True)
class RunsState:
    """A visitor's state of the Runs page, changed in place."""

    order: int = 0
    """Number of changes of the rows. A new number makes a new table, in which only `select` is selected."""
    select: str | None = None
    """Id of the run that the next table begins with."""
    done: str = ""
    """Message on the last action, until it is shown."""
    error: str = ""
    """Reason why the last action failed, until it is shown."""
    taken: set[str] = field(default_factory=set)
    """Ids of uploaded files that are in the list already."""


def current() -> RunsState:
    """This visitor's state."""
    return kept("runs", RunsState, RunsState)


def reorder(select: str | None = None) -> None:
    """Makes a new table after a change of rows: no selected row may become another run. `select`: run to select."""
    state = current()
    state.order, state.select = state.order + 1, select
