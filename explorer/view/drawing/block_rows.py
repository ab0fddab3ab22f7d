"""The blocks of a run as rows: one row for each block, or for a stretch of blocks where there are too many to draw."""

from __future__ import annotations

from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement
from explorer.view.drawing.rows import Row, rows_of

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
    """Sum of one integer field over the blocks of `row`; one that was not measured adds nothing."""
    return sum(int(getattr(run.by_fqn[fqn], field)) for fqn in row.fqns if fqn in run.by_fqn)
