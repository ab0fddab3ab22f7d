"""Saved activations by block, and by operator inside a block: the places where a policy can save memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import plotly.graph_objects as go

from explorer.plan.memory.ledger import array_of, belongs
from explorer.record.allocations import ROLES
from explorer.record.comparison import Comparison
from explorer.record.measurement import MeasuredBlock, Measurement
from explorer.view.drawing.colours import RUN_COLOURS
from explorer.view.drawing.figure import BarSeries, Chart, add_bars, bars, bold, empty, figure, hatch
from explorer.view.drawing.rows import NO_COSTS, WHOLE_MODEL, block_names, chart_rows, row_sum, runs_of
from explorer.view.drawing.units import byte_axis, count, flops, mib

QUESTION = "What does each block save?"


def saved_bytes_chart(run: Comparison | Measurement) -> Chart:
    """Chart of the bytes that each block keeps for backward, in one run or in both."""
    return Chart(
        name="saved bytes by block",
        figure=_picture(run),
        alt=f"Bars of the bytes each block keeps for backward. In all: {_answer(runs_of(run))}.",
        rows=lambda: _rows(run),
    )


def _picture(run: Comparison | Measurement) -> go.Figure:
    """Bytes each block holds for backward when forward ends, of one run or of both.

    Every bar's customdata starts with the fqns of its row, joined by a space, for clicks.
    """
    runs = runs_of(run)
    rows = chart_rows(*runs.values())
    if not rows:
        return empty(QUESTION, NO_COSTS)
    lines = {
        name: [row_sum(measured, row, "saved_after_forward_bytes") for row in rows] for name, measured in runs.items()
    }
    unit, unit_name = byte_axis(max(max(line) for line in lines.values()))
    fig = figure(QUESTION, _answer(runs), height=150 + (14 + 12 * len(runs)) * max(len(rows), 4))
    for name, line in lines.items():
        again = [row_sum(runs[name], row, "n_recompute") for row in rows]
        fig.add_trace(
            go.Bar(
                y=[row.label for row in rows], x=[size / unit for size in line], name=name, orientation="h",
                customdata=[[" ".join(row.fqns), mib(size), n] for row, size, n in zip(rows, line, again)],
                # Hatched where the run recomputes the block: / means recompute wherever a pattern is drawn.
                marker={"color": RUN_COLOURS[name], "pattern": hatch(["/" if n else "" for n in again])},
                hovertemplate=bold("%{y}") + f", {name}\n%{{customdata[1]}} saved for backward"
                "\nforward ran again %{customdata[2]} times",
            )
        )  # fmt: skip
    return bars(fig, f"saved ({unit_name}); hatched: recomputed", mode="group")


def _rows(run: Comparison | Measurement) -> list[dict[str, object]]:
    """Rows of all blocks: saved bytes, number of runs, FLOPs."""
    runs = runs_of(run)
    table = []
    for fqn in block_names(*runs.values()):
        row: dict[str, object] = {"block": fqn or WHOLE_MODEL}
        for name, measured in runs.items():
            cost = measured.by_fqn.get(fqn)
            if cost is not None:
                row |= _columns(cost, name if len(runs) > 1 else "")
        table.append(row)
    return table


def _columns(cost: MeasuredBlock, name: str) -> dict[str, object]:
    prefix = f"{name}: " if name else ""
    return {
        f"{prefix}saved for backward (bytes)": cost.saved_after_forward_bytes,
        f"{prefix}saved": mib(cost.saved_after_forward_bytes),
        f"{prefix}alive at the peak (bytes)": cost.at_peak_bytes,
        f"{prefix}ran forward": cost.n_forward,
        f"{prefix}ran again": cost.n_recompute,
        f"{prefix}forward": flops(cost.forward_flops),
        f"{prefix}recompute": flops(cost.recompute_flops),
        f"{prefix}skipped by early stop": flops(cost.skipped_flops),
    }


def _answer(runs: dict[str, Measurement]) -> str:
    if not all(run.complete for run in runs.values()):
        return "as far as the step came"
    return " to ".join(mib(run.saved_after_forward_bytes) for run in runs.values()) + " saved when forward ends"


MOST = 5
REST = "all others"
NOTHING = "Nothing made in this block is kept for backward."


def operators_chart(run: Comparison | Measurement, block: str) -> Chart:
    """Chart of the bytes that the operators of `block` keep when forward ends. Empty `block`: the whole model."""
    named = block or "the model"
    saved = {name: _kept(measured, block) for name, measured in runs_of(run).items()}
    return Chart(
        name=f"operators of {named}",
        figure=_operator_picture(named, saved),
        alt=f"Bars of the bytes that each operator of {named} keeps for backward. {_operator_answer(saved)}.",
        rows=lambda: _operator_rows(saved),
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


def _operator_picture(named: str, saved: dict[str, dict[str, tuple[int, int]]]) -> go.Figure:
    question = f"Which operators of {named} save most?"
    names = _names(saved)
    if not names:
        return empty(question, NOTHING)
    lines = {run: [_of(by_op, name, names) for name in names] for run, by_op in saved.items()}
    unit, unit_name = byte_axis(max(size for line in lines.values() for size, _ in line))
    fig = figure(question, _operator_answer(saved), height=150 + (14 + 12 * len(saved)) * max(len(names), 3))
    for run, line in lines.items():
        figures = [f"{mib(size)} in {count(n, 'allocation')}" for size, n in line]
        lengths = [size / unit for size, _ in line]
        series = BarSeries(name=run, lengths=lengths, figures=figures, colour=RUN_COLOURS[run])
        add_bars(fig, names, series, showlegend=len(lines) > 1)
    return bars(fig, f"saved for backward ({unit_name})", mode="group")


def _names(saved: dict[str, dict[str, tuple[int, int]]]) -> list[str]:
    """The five largest of either run, the largest first, and whether there are more."""
    most: Counter[str] = Counter()
    for by_op in saved.values():
        for op, (size, _) in by_op.items():
            most[op] = max(most[op], size)
    names = [op for op, _ in most.most_common(MOST)]
    return [*names, REST] if len(most) > MOST else names


def _of(by_op: dict[str, tuple[int, int]], name: str, shown: list[str]) -> tuple[int, int]:
    if name != REST:
        return by_op.get(name, (0, 0))
    rest = [both for op, both in by_op.items() if op not in shown]
    return sum(size for size, _ in rest), sum(n for _, n in rest)


def _operator_answer(saved: dict[str, dict[str, tuple[int, int]]]) -> str:
    sums = [mib(sum(size for size, _ in by_op.values())) for by_op in saved.values()]
    return " to ".join(sums) + " saved when forward ends"


def _operator_rows(saved: dict[str, dict[str, tuple[int, int]]]) -> list[dict[str, Any]]:
    """Every operator, the largest first."""
    ops = dict.fromkeys(op for by_op in saved.values() for op in by_op)
    prefix = {run: f"{run}: " if len(saved) > 1 else "" for run in saved}
    return [
        {"operator": op}
        | {f"{prefix[run]}saved (bytes)": by_op.get(op, (0, 0))[0] for run, by_op in saved.items()}
        | {f"{prefix[run]}allocations": by_op.get(op, (0, 0))[1] for run, by_op in saved.items()}
        for op in ops
    ]


def _short(op: str) -> str:
    """`aten.addmm.default` as `addmm`, which is how the operator is called."""
    parts = op.split(".")
    return parts[1] if len(parts) > 2 and parts[0] == "aten" else op or "(before the step)"
