"""The row of a request: all that differs between requests. Rows of slices need it before protocol.py gathers them."""

from __future__ import annotations

from typing import NamedTuple

from explorer.record.base import Record


class RequestRow(NamedTuple):
    """A request is one row, and the function that the row names."""

    function: str
    """Name of the function that answers it, called as `function(request, report)`."""
    result: type[Record]
    pages: tuple[str, ...]
    """Pages that start it as their job and find it again after a refresh."""
    doing: str = ""
    """Words of its progress on these pages."""
    module: str = "explorer.jobs.answers"
    """Where the function is."""
    needs: tuple[str, ...] | None = None
    """Modules that the server imports before the job starts; None: all that it imports while idle."""
