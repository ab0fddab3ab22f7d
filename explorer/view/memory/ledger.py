"""Chart of the bytes alive at a moment, by block and role. The bars add up to the held bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from explorer.plan.names import is_within
from explorer.record.allocations import ROLES, Ledger, Role
from explorer.view.drawing.colours import ROLE_COLOURS, ROLE_PATTERNS
from explorer.view.drawing.figure import Chart, add_bars, bars, byte_series, figure
from explorer.view.drawing.rows import ROOT_LABEL, rows_of
from explorer.view.drawing.units import byte_axis, mib, percent, percent_whole


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
    largest = ", ".join(f"{block or ROOT_LABEL} {mib(size)}" for block, size in list(ledger.by_block.items())[:3])
    return Chart(
        name=f"alive {moment}",
        figure=bars(fig, f"bytes alive ({unit_name})"),
        alt=f"Stacked bars of the bytes alive {place(ledger)}: {mib(ledger.total_bytes)} in all. Largest: {largest}.",
        rows=lambda: [
            {
                "block": cell.block or ROOT_LABEL,
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


def _grid(ledger: Ledger, fqns: Sequence[str]) -> tuple[list[str], list[tuple[str, ...]], list[dict[Role, int]]]:
    """Labels, fqns and bytes by role of each row that holds something."""
    in_model = set(fqns)
    rows = rows_of([*fqns, *sorted((block for block in ledger.by_block if block not in in_model), key=_natural)])
    labels = [*(row.label for row in rows.rows), ROOT_LABEL]
    members = [*(row.fqns for row in rows.rows), ("",)]
    sizes: list[dict[Role, int]] = [{} for _ in labels]
    for cell in ledger.cells:
        row = sizes[rows.index(cell.block)]
        row[cell.role] = row.get(cell.role, 0) + cell.n_bytes
    full = [i for i, row in enumerate(sizes) if row]
    return [labels[i] for i in full], [members[i] for i in full], [sizes[i] for i in full]
