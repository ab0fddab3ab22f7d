"""Whether the columns of a recorded timeline fit together: a checksum says that a file is whole, not that it can be."""

from __future__ import annotations

from collections.abc import Iterator

from explorer.record.allocations import ROLES, Allocations
from explorer.record.base import Column, Record
from explorer.record.measurement import Measurement
from explorer.record.ranks import RecordedRanks


def unsound(record: Record) -> str:
    """The first fault of a measurement, or of those inside a comparison or of its ranks; empty: none."""
    runs = {name: getattr(record, name, None) if name else record for name in ("", "baseline", "candidate")}
    if isinstance(record, RecordedRanks):
        runs = {f"rank {run.rank}": run for run in record.ranks}
        if not runs:
            return "no rank"
    for name, run in runs.items():
        if isinstance(run, Measurement) and run.allocations is not None:
            for fault in _faults(run):
                return f"{name}: {fault}" if name else fault
    return ""


def _faults(run: Measurement) -> Iterator[str]:
    log = run.allocations
    assert log is not None
    if not 0 <= log.n_ticks <= len(log.born) * 2:
        yield f"{log.n_ticks} ticks for {len(log.born)} allocations"
        return
    yield from _columns(log)
    for span in run.phases:
        if not 0 <= span.first_tick <= span.end_tick <= log.n_ticks + 1:
            yield f"a phase from tick {span.first_tick} to {span.end_tick} of {log.n_ticks}"


def _columns(log: Allocations) -> Iterator[str]:
    n_rows, end = len(log.born), log.n_ticks + 1
    columns = {
        "n_bytes": (log.n_bytes, n_rows, 2**63 - 1),
        "born": (log.born, n_rows, log.n_ticks),
        "died": (log.died, n_rows, end),
        "role": (log.role, n_rows, len(ROLES) - 1),
        "block": (log.block, n_rows, len(log.blocks) - 1),
        "op": (log.op, n_rows, len(log.ops) - 1),
        "weight_casts": (log.weight_casts, len(log.weight_casts), n_rows - 1),
        "calls.block": (log.calls.block, len(log.calls.block), len(log.blocks) - 1),
        "calls.first_tick": (log.calls.first_tick, len(log.calls.block), end),
        "calls.end_tick": (log.calls.end_tick, len(log.calls.block), end),
        "calls.n_inputs": (log.calls.n_inputs, len(log.calls.block), len(log.calls.entries)),
        "calls.n_outputs": (log.calls.n_outputs, len(log.calls.block), len(log.calls.entries)),
        "calls.entries": (log.calls.entries, sum(log.calls.n_inputs) + sum(log.calls.n_outputs), n_rows - 1),
    }
    for name, (column, length, most) in columns.items():
        if fault := _misfit(column, length, most):
            yield f"{name} {fault}"
    if len(log.time_ns) not in (0, end):
        yield f"time_ns has {len(log.time_ns)} entries for {end} ticks"
    if any(born > died for born, died in zip(log.born, log.died)):
        yield "an allocation dies before it is born"


def _misfit(column: Column, length: int, most: int) -> str:
    if len(column) != length:
        return f"has {len(column)} entries instead of {length}"
    return f"goes from {min(column)} to {max(column)}" if column and not 0 <= min(column) <= max(column) <= most else ""
