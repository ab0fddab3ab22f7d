"""Bars of bytes: saved by block, saved by operator inside a block, and alive at a moment by block and role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from explorer.plan.memory.ledger import array_of, belongs
from explorer.plan.memory.outside import by_line, by_place
from explorer.plan.names import is_within
from explorer.record.allocations import ROLES, Ledger, Role
from explorer.record.comparison import Comparison
from explorer.record.measurement import Measurement
from explorer.view.drawing.colours import ROLE_COLOURS, ROLE_PATTERNS, RUN_COLOURS
from explorer.view.drawing.figure import Chart, add_bars, bars, byte_series, empty, figure
from explorer.view.drawing.rows import NO_COSTS, ROOT_LABEL, WHOLE_MODEL, chart_rows, row_sums, rows_of, runs_of
from explorer.view.drawing.units import byte_axis, count, from_to, mib, percent, percent_whole

MOST = 5
"""Operators that have a bar of their own."""
REST = "all others"
NOTHING = "Nothing made in this block is kept for backward."


def saved_bytes_chart(run: Comparison | Measurement) -> Chart:
    """Chart of the bytes that each block holds for backward when forward ends, of one run or of both.

    Every bar's customdata starts with the fqns of its row, joined by a space, for clicks.
    """
    runs = runs_of(run)
    rows, question = chart_rows(*runs.values()), "What does each block save?"
    answer = "as far as the step came"
    if all(measured.complete for measured in runs.values()):
        answer = f"{_sizes([measured.saved_after_forward_bytes for measured in runs.values()])} saved when forward ends"
    lines = {name: row_sums(measured, rows, "saved_after_forward_bytes") for name, measured in runs.items()}
    fig = empty(question, NO_COSTS)
    if rows:
        unit, unit_name = byte_axis(max(max(line) for line in lines.values()))
        fig = figure(question, answer, height=_height(len(runs), len(rows), 4))
        for name, line in lines.items():
            again = row_sums(runs[name], rows, "n_recompute")
            # Hatched where the run recomputes the block: / means recompute wherever a pattern is drawn.
            series = byte_series(name, line, unit, RUN_COLOURS[name], ["/" if n else "" for n in again])
            figures = [f"{mib(size)} saved for backward\nforward ran again {n} times" for size, n in zip(line, again)]
            picks = [" ".join(row.fqns) for row in rows]
            add_bars(fig, [row.label for row in rows], replace(series, figures=figures, picks=picks))
        bars(fig, f"saved ({unit_name}); hatched: recomputed", mode="group")
    return Chart(
        name="saved bytes by block",
        figure=fig,
        alt=f"Bars of the bytes each block keeps for backward. In all: {answer}.",
        rows=lambda: _rows(runs),
    )


def _sizes(sizes: list[int | None] | list[int]) -> str:
    return from_to(*sizes) if len(sizes) == 2 else mib(sizes[0])


def _height(n_runs: int, n_rows: int, least: int) -> int:
    """Pixels of a chart with a bar for each run in each row."""
    return 150 + (14 + 12 * n_runs) * max(n_rows, least)


def _rows(runs: dict[str, Measurement]) -> list[dict[str, object]]:
    """What each block that ran costs in the last run, and what it saves in every run."""
    rows = []
    for cost in list(runs.values())[-1].blocks:
        row: dict[str, object] = {
            "block": cost.fqn or WHOLE_MODEL, "ran forward": cost.n_forward, "ran again": cost.n_recompute,
        }  # fmt: skip
        for name, run in runs.items():
            if cost.fqn in run.by_fqn:
                of_run = f", {name}" if len(runs) > 1 else ""
                row[f"saved{of_run} (bytes)"] = run.by_fqn[cost.fqn].saved_after_forward_bytes
        row["alive at the peak (bytes)"] = cost.at_peak_bytes
        row["recompute (FLOP)"] = cost.recompute_flops
        row["skipped by early stop (FLOP)"] = cost.skipped_flops
        rows.append(row)
    return rows


def operators_chart(run: Comparison | Measurement, block: str) -> Chart:
    """Chart of the bytes that the operators of `block` keep when forward ends. Empty `block`: the whole model."""
    named = block or "the model"
    saved = {name: _kept(measured, block) for name, measured in runs_of(run).items()}
    totals = [sum(size for size, _ in by_op.values()) for by_op in saved.values()]
    answer = f"{_sizes(totals)} saved when forward ends"
    question, names = f"Which operators of {named} save most?", _names(saved)
    fig = empty(question, NOTHING)
    if names:
        lines = {run_name: [_of(by_op, name, names) for name in names] for run_name, by_op in saved.items()}
        unit, unit_name = byte_axis(max(size for line in lines.values() for size, _ in line))
        fig = figure(question, answer, height=_height(len(saved), len(names), 3))
        for run_name, line in lines.items():
            series = byte_series(run_name, [size for size, _ in line], unit, RUN_COLOURS[run_name])
            figures = [f"{mib(size)} in {count(n, 'allocation')}" for size, n in line]
            add_bars(fig, names, replace(series, figures=figures), showlegend=len(lines) > 1)
        bars(fig, f"saved for backward ({unit_name})", mode="group")
    return Chart(
        name=f"operators of {named}",
        figure=fig,
        alt=f"Bars of the bytes that each operator of {named} keeps for backward. {answer}.",
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
    n_bytes, n_made = Counter[str](), Counter[str]()
    for entry in entries.tolist():
        op = _short(log.ops[log.op[entry]])
        n_bytes[op] += log.n_bytes[entry]
        n_made[op] += 1
    return {op: (size, n_made[op]) for op, size in n_bytes.most_common()}


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
    n_bytes = n_allocations = 0
    for op, (size, n) in by_op.items():
        if op not in shown:
            n_bytes, n_allocations = n_bytes + size, n_allocations + n
    return n_bytes, n_allocations


def _operator_rows(saved: dict[str, dict[str, tuple[int, int]]]) -> list[dict[str, str | int]]:
    """Every operator, the largest first."""
    ops = dict.fromkeys(op for by_op in saved.values() for op in by_op)
    rows = []
    for op in ops:
        sizes: dict[str, str | int] = {"operator": op}
        counts: dict[str, str | int] = {}
        for run, by_op in saved.items():
            prefix = f"{run}: " if len(saved) > 1 else ""
            sizes[f"{prefix}saved (bytes)"], counts[f"{prefix}allocations"] = by_op.get(op, (0, 0))
        rows.append(sizes | counts)
    return rows


def _short(op: str) -> str:
    """`aten.addmm.default` as `addmm`, which is how the operator is called."""
    parts = op.split(".")
    return parts[1] if len(parts) > 2 and parts[0] == "aten" else op or "(before the step)"


def ledger_chart(ledger: Ledger, fqns: Sequence[str] = ()) -> Chart:
    """Chart of the bytes alive at a moment, a bar per block, stacked by role. The rows of its table add up.

    `fqns`: all blocks of the model in module order, to order the rows. Every bar's customdata starts with the fqns of
    its row, joined by a space, for clicks.
    """
    moment = "at the peak" if ledger.is_peak else f"at event {ledger.tick}"
    labels, members, sizes = _grid(ledger, fqns)
    unit, unit_name = byte_axis(max((sum(row.values()) for row in sizes), default=0))
    fig = figure(
        f"What is alive {moment}?", f"{mib(ledger.total_bytes)}, {place(ledger)}", height=210 + 24 * max(len(labels), 4)
    )
    for role in ROLES:
        line = [row.get(role, 0) for row in sizes]
        if any(line):
            figures = [f"{mib(size)}, {percent(size / ledger.total_bytes)} of all" for size in line]
            series = byte_series(role, line, unit, ROLE_COLOURS[role], ROLE_PATTERNS[role])
            series = replace(series, figures=figures, picks=[" ".join(fqn) for fqn in members])
            # A click finds a block, it does not single out a bar.
            add_bars(fig, labels, series, unselected={"marker": {"opacity": 1}})
    largest = ", ".join(f"{place} {mib(size)}" for place, size in list(by_place(ledger).items())[:3])
    return Chart(
        name=f"alive {moment}",
        figure=bars(fig, f"bytes alive ({unit_name})"),
        alt=f"Stacked bars of the bytes alive {place(ledger)}: {mib(ledger.total_bytes)} in all. Largest: {largest}.",
        rows=lambda: [
            {
                "block": cell.block or cell.line or ROOT_LABEL,
                "role": cell.role,
                "bytes": cell.n_bytes,
                "size": mib(cell.n_bytes),
                "share": cell.n_bytes / ledger.total_bytes,
                "allocations": cell.n_allocations,
                "largest made by": cell.largest_op or "(before the step)",
            }
            for cell in ledger.cells
        ],
    )


def place(ledger: Ledger) -> str:
    """Position of the tick within its phase: `93 % into backward, in layers.0`."""
    if ledger.phase is None or ledger.phase_share is None:
        return f"at event {ledger.tick}"
    phase = f"{ledger.phase} of {ledger.phase_block}" if ledger.phase_block else ledger.phase
    is_clear = not ledger.at_block or (ledger.phase_block and is_within(ledger.at_block, ledger.phase_block))
    inside = "" if is_clear else f", in {ledger.at_block}"
    return f"{percent_whole(ledger.phase_share)} into {phase}{inside}"


def _natural(fqn: str) -> list[tuple[int, str]]:
    """`layers.2` before `layers.10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in fqn.split(".")]


MOST_LINES = 8
"""Lines of code outside of all blocks that have a bar, the largest first."""


def _grid(ledger: Ledger, fqns: Sequence[str]) -> tuple[list[str], list[tuple[str, ...]], list[dict[Role, int]]]:
    """Labels, fqns and bytes by role of each row that holds something."""
    in_model = set(fqns)
    rows = rows_of([*fqns, *sorted((block for block in ledger.by_block if block not in in_model), key=_natural)])
    lines = list(by_line(ledger))[:MOST_LINES]
    labels = [*(row.label for row in rows.rows), *lines, ROOT_LABEL]
    members = [*(row.fqns for row in rows.rows), *[("",)] * len(lines), ("",)]
    by_role: dict[int, dict[Role, int]] = {}
    for cell in ledger.cells:
        place = rows.index(cell.block) % len(labels)  # -1, the model itself, is the last
        if cell.line in lines:
            place = len(rows.rows) + lines.index(cell.line)
        sizes = by_role.setdefault(place, {})
        sizes[cell.role] = sizes.get(cell.role, 0) + cell.n_bytes
    full = sorted(by_role)
    return [labels[i] for i in full], [members[i] for i in full], [by_role[i] for i in full]
