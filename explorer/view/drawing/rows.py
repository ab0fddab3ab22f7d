"""The blocks that become rows of a chart: few enough to read, in module order, and together the whole model.

The rows are a cut through the tree of fqns. A numbered module (`layers.7`, `down2`) is one row, not split further
unless the module contains numbered modules (`layer1.0`). If the rows are still too many, consecutive members share a
row (`layers.0 to layers.9`). A sum over the rows is therefore the sum over the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from explorer.record.base import Record
from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement

MAX_ROWS = 24
_NUMBERED = re.compile(r"\d$")
ROOT_LABEL = "(model itself)"


class Row(Record):
    """A row of a chart."""

    label: str
    fqns: tuple[str, ...]
    """Blocks of the row; the row includes everything below them."""


class Rows(Record):
    """All rows of a chart, in module order, and the row of any fqn."""

    rows: tuple[Row, ...]
    _row_of: Mapping[str, int]

    def index(self, fqn: str) -> int:
        """Row of `fqn` or of its nearest ancestor; -1: it lies above all rows (the model itself, a split container)."""
        at = fqn
        while at not in self._row_of:
            if not at:
                return -1
            at = at.rpartition(".")[0]
        return self._row_of[at]


def rows_of(fqns: Iterable[str], limit: int = MAX_ROWS) -> Rows:
    """Rows of a model, at most `limit`; `fqns` are its blocks in module order."""
    children: dict[str, dict[str, None]] = {}
    for fqn in fqns:
        parts = fqn.split(".") if fqn else []
        for depth in range(len(parts)):
            children.setdefault(".".join(parts[:depth]), {})[".".join(parts[: depth + 1])] = None
    cut = _cut(children, limit)
    rows = [Row(label=fqn or ROOT_LABEL, fqns=(fqn,)) for fqn in cut]
    if len(rows) > limit:
        rows = _share(cut, limit)
    return Rows(rows=tuple(rows), _row_of={fqn: i for i, row in enumerate(rows) for fqn in row.fqns})


def _cut(children: dict[str, dict[str, None]], limit: int) -> list[str]:
    """The tree opened level by level: containers of members always, other modules while the rows fit."""
    cut = list(children.get("", {})) or [""]
    while True:
        opened: list[str] = []
        n_more = 0
        for fqn in cut:
            below = list(children.get(fqn, {}))
            fits = len(cut) + n_more + len(below) - 1 <= limit
            if below and _may_open(fqn, below, fits=fits):
                opened += below
                n_more += len(below) - 1
            else:
                opened.append(fqn)
        if opened == cut:
            return cut
        cut = opened


def _may_open(fqn: str, below: list[str], *, fits: bool) -> bool:
    members = all(_is_member(child) for child in below)
    if _is_member(fqn):
        return False
    if _NUMBERED.search(fqn):
        return members and fits
    return fits or any(_NUMBERED.search(child) for child in below)


def _is_member(fqn: str) -> bool:
    """Whether it is an entry of a ModuleList or Sequential."""
    return fqn.rpartition(".")[2].isdecimal()


def _share(cut: list[str], limit: int) -> list[Row]:
    """Consecutive members in groups of one size: the smallest that gives at most `limit` rows, where one does."""
    runs: list[list[str]] = []
    for fqn in cut:
        together = runs and _NUMBERED.search(fqn) and _NUMBERED.search(runs[-1][-1])
        if together and runs[-1][-1].rpartition(".")[0] == fqn.rpartition(".")[0]:
            runs[-1].append(fqn)
        else:
            runs.append([fqn])
    longest = max(len(run) for run in runs)
    size = 2
    while size < longest and sum(-(-len(run) // size) for run in runs) > limit:
        size += 1
    rows = []
    for run in runs:
        for i in range(0, len(run), size):
            first, *others = group = run[i : i + size]
            rows.append(Row(label=f"{first} to {others[-1]}" if others else first, fqns=tuple(group)))
    return rows


WHOLE_MODEL = "(whole model)"
NO_COSTS = "Blocks were not measured in this run."


def runs_of(run: Comparison | Measurement) -> dict[str, Measurement]:
    """The runs inside, baseline first."""
    if isinstance(run, Comparison):
        return {"baseline": run.baseline, "candidate": run.candidate}
    return {"baseline": run}


def block_names(*runs: Measurement) -> list[str]:
    """Every fqn that any of the runs has measured, in module order."""
    return list(dict.fromkeys(cost.fqn for run in runs for cost in run.blocks))


def chart_rows(*runs: Measurement) -> tuple[Row, ...]:
    """The blocks that are rows of a chart; empty: no run has measured any."""
    names = block_names(*runs)
    return rows_of(names).rows if names else ()


def row_sum(run: Measurement, row: Row, field: str) -> int:
    """Sum of one integer field over the blocks of `row`; an unmeasured block adds 0."""
    return sum(int(getattr(run.by_fqn[fqn], field)) for fqn in row.fqns if fqn in run.by_fqn)


def row_sums(run: Measurement, rows: Iterable[Row], field: str) -> list[int]:
    return [row_sum(run, row, field) for row in rows]
