"""Inside one block: which operators made what it keeps for backward, the five largest first."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import plotly.graph_objects as go

from explorer.plan.memory.ledger import array_of, belongs
from explorer.record.allocations import ROLES
from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement
from explorer.view.drawing.block_rows import runs_of
from explorer.view.drawing.chart import Chart
from explorer.view.drawing.colours import RUN_COLOURS
from explorer.view.drawing.figure import bars, empty, figure
from explorer.view.drawing.lying_bars import BarSeries, add_bars
from explorer.view.drawing.units import byte_axis, count, mib

MOST = 5
REST = "all others"
NOTHING = "Nothing made in this block is kept for backward."


def operators_chart(run: Comparison | Measurement, block: str) -> Chart:
    """What the operators of `block` (the empty string: the whole model) keep when forward ends."""
    named = block or "the model"
    kept = {name: _kept(one, block) for name, one in runs_of(run).items()}
    return Chart(
        name=f"operators of {named}",
        figure=_picture(named, kept),
        alt=f"Bars of the bytes that each operator of {named} keeps for backward. {_answer(kept)}.",
        rows=lambda: _rows(kept),
    )


def _kept(run: Measurement, block: str) -> dict[str, tuple[int, int]]:
    """(bytes, allocations) of saved activations alive when forward ends, by operator, the largest first."""
    log, end = run.allocations, run.forward_end_tick
    if log is None or end is None:
        return {}
    saved = array_of(log.role) == ROLES.index("saved activation")
    alive = (array_of(log.born) <= end) & (end < array_of(log.died))
    entries = np.flatnonzero(saved & alive & belongs(log, block))
    n_bytes: Counter[str] = Counter()
    n_made: Counter[str] = Counter()
    for entry in entries.tolist():
        op = _short(log.ops[log.op[entry]])
        n_bytes[op] += log.n_bytes[entry]
        n_made[op] += 1
    return {op: (size, n_made[op]) for op, size in n_bytes.most_common()}


def _picture(named: str, kept: dict[str, dict[str, tuple[int, int]]]) -> go.Figure:
    question = f"Which operators of {named} save most?"
    names = _names(kept)
    if not names:
        return empty(question, NOTHING)
    lines = {run: [_of(by_op, name, names) for name in names] for run, by_op in kept.items()}
    unit, unit_name = byte_axis(max(size for line in lines.values() for size, _ in line))
    fig = figure(question, _answer(kept), height=150 + (14 + 12 * len(kept)) * max(len(names), 3))
    for run, line in lines.items():
        figures = [f"{mib(size)} in {count(n, 'allocation')}" for size, n in line]
        lengths = [size / unit for size, _ in line]
        series = BarSeries(name=run, lengths=lengths, figures=figures, colour=RUN_COLOURS[run])
        add_bars(fig, names, series, showlegend=len(lines) > 1)
    return bars(fig, f"saved for backward ({unit_name})", mode="group")


def _names(kept: dict[str, dict[str, tuple[int, int]]]) -> list[str]:
    """The five largest of either run, the largest first, and whether there are more."""
    most: Counter[str] = Counter()
    for by_op in kept.values():
        for op, (size, _) in by_op.items():
            most[op] = max(most[op], size)
    names = [op for op, _ in most.most_common(MOST)]
    return [*names, REST] if len(most) > MOST else names


def _of(by_op: dict[str, tuple[int, int]], name: str, shown: list[str]) -> tuple[int, int]:
    if name != REST:
        return by_op.get(name, (0, 0))
    rest = [both for op, both in by_op.items() if op not in shown]
    return sum(size for size, _ in rest), sum(n for _, n in rest)


def _answer(kept: dict[str, dict[str, tuple[int, int]]]) -> str:
    sums = [mib(sum(size for size, _ in by_op.values())) for by_op in kept.values()]
    return " to ".join(sums) + " saved when forward ends"


def _rows(kept: dict[str, dict[str, tuple[int, int]]]) -> list[dict[str, Any]]:
    """Every operator, the largest first."""
    ops = dict.fromkeys(op for by_op in kept.values() for op in by_op)
    prefix = {run: f"{run}: " if len(kept) > 1 else "" for run in kept}
    return [
        {"operator": op}
        | {f"{prefix[run]}saved (bytes)": by_op.get(op, (0, 0))[0] for run, by_op in kept.items()}
        | {f"{prefix[run]}allocations": by_op.get(op, (0, 0))[1] for run, by_op in kept.items()}
        for op in ops
    ]


def _short(op: str) -> str:
    """`aten.addmm.default` as `addmm`, which is how the operator is called."""
    parts = op.split(".")
    return parts[1] if len(parts) > 2 and parts[0] == "aten" else op or "(before the step)"
