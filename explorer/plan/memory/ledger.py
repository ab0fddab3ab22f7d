"""Bytes at every tick of a step, what is alive at one of them by role and block, and the sentence for such a moment.

Charts and headlines share one series, computed from the entries that were alive. All arrays have `n_ticks + 1` int64
values; tick 0 is the state before the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from explorer.errors import BadInput
from explorer.plan.names import is_within
from explorer.plan.sizes import mib
from explorer.record.allocations import ROLES, Allocations, Ledger, LedgerCell, PhaseSpan, Role
from explorer.record.base import Column, Record
from explorer.record.measurement import Measurement

Bytes = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Events(Record):
    """The event of each tick."""

    entry: Bytes
    """The entry that was born or died there; -1: none."""
    sign: NDArray[np.int8]
    """1 allocated, -1 freed, 0 nothing."""


def array_of(values: Column) -> Bytes:
    """A column as a numpy array, without a copy."""
    return np.frombuffer(values, dtype=np.int64) if len(values) else np.empty(0, dtype=np.int64)


def ints(values: Sequence[object]) -> Bytes:
    """Whole numbers, or rows of them, as an array: int64 also where there are none."""
    return np.array(values, dtype=np.int64)


def held(log: Allocations, only: Mask | None = None) -> Bytes:
    """Bytes alive at each tick; `only` picks the entries that count."""
    size, born, died = array_of(log.n_bytes), array_of(log.born), array_of(log.died)
    if only is not None:
        size, born, died = size[only], born[only], died[only]
    length = log.n_ticks + 2
    # bincount adds in float64, exact below 2**53 bytes (8 PiB).
    changes = np.bincount(born, size, length) - np.bincount(died, size, length)
    return np.cumsum(changes[:-1]).astype(np.int64)


def held_by_role(log: Allocations, only: Mask | None = None) -> Bytes:
    """Bytes alive at each tick, one row a role, in the order of ROLES; the rows add up to `held`."""
    role = array_of(log.role)
    rows = [held(log, role == i if only is None else (role == i) & only) for i in range(len(ROLES))]
    return np.stack(rows)


def belongs(log: Allocations, block: str) -> Mask:
    """Mask of the entries that belong to `block` or to a block inside; the empty string is the whole model."""
    inside = np.fromiter((is_within(fqn, block) for fqn in log.blocks), dtype=np.bool_, count=len(log.blocks))
    return inside[array_of(log.block)] if len(log.block) else np.zeros(0, dtype=np.bool_)


def alive(log: Allocations, tick: int) -> NDArray[np.intp]:
    """Entries alive at `tick`."""
    return np.flatnonzero((array_of(log.born) <= tick) & (tick < array_of(log.died)))


def events(log: Allocations) -> Events:
    """The entry and the direction of each tick 0..n_ticks."""
    entry = np.full(log.n_ticks + 2, -1)
    sign = np.zeros(log.n_ticks + 2, dtype=np.int8)
    index = np.arange(len(log.n_bytes))
    for ticks, direction in ((array_of(log.died), -1), (array_of(log.born), 1)):
        entry[ticks] = index
        sign[ticks] = direction
    # What was there before the step, and what outlives it, is not an event.
    entry[[0, -1]], sign[[0, -1]] = -1, 0
    return Events(entry=entry[:-1], sign=sign[:-1])


def peak_tick(log: Allocations) -> int:
    """First tick at which most is held."""
    return int(held(log).argmax())


def ledger(measurement: Measurement, tick: int | None = None) -> Ledger:
    """The ledger at `tick`, by default at the step's peak. Raises BadInput where no timeline was recorded.

    `ledger(m).total_bytes == m.held_peak_bytes` for every measurement with allocations.
    """
    log = measurement.allocations
    if log is None:
        raise BadInput("This run has no memory timeline.", hint="Run it again on a device whose allocator can be read.")
    peak = peak_tick(log)
    at = peak if tick is None else tick
    if not 0 <= at <= log.n_ticks:
        raise BadInput(f"Tick {at} was asked for, the timeline has ticks 0 to {log.n_ticks}.")
    span = span_at(measurement.phases, at)
    event = events(log)
    entry = int(event.entry[at])
    # Compiled code has no blocks; the gradient that it makes is named after its parameter's block all the same.
    is_in_block = entry >= 0 and not measurement.ran_compiled
    moment = Ledger(
        tick=at,
        phase=None,
        phase_block="",
        phase_share=None,
        at_block=log.blocks[log.block[entry]] if is_in_block else "",
        is_peak=at == peak,
        cells=cells_of(log, alive(log, at)),
    )
    if span is None:
        return moment
    share = _share(measurement.phases, span, at)
    return replace(moment, phase=span.phase, phase_block=span.block, phase_share=share)


def span_at(phases: tuple[PhaseSpan, ...], tick: int) -> PhaseSpan | None:
    """The span that `tick` lies in; None: outside all of them."""
    return next((span for span in phases if span.first_tick <= tick < span.end_tick), None)


def _share(phases: tuple[PhaseSpan, ...], span: PhaseSpan, tick: int) -> float:
    """Progress of the phase from 0 to 1; backward and its recomputes count as one stretch."""
    first, last = span.first_tick, span.end_tick - 1
    if span.phase == "backward":
        at = phases.index(span)
        stretch = ("backward", "recompute")
        begin = next((i + 1 for i in range(at, -1, -1) if phases[i].phase not in stretch), 0)
        end = next((i for i in range(at, len(phases)) if phases[i].phase not in stretch), len(phases))
        first, last = phases[begin].first_tick, phases[end - 1].end_tick - 1
    return (tick - first) / max(last - first, 1)


def cells_of(log: Allocations, entries: NDArray[np.intp]) -> tuple[LedgerCell, ...]:
    """The `entries` summed by role and block, the largest cell first."""
    if not len(entries):
        return ()
    sizes = array_of(log.n_bytes)[entries]
    line = array_of(log.line)[entries] if log.line else np.zeros(len(entries), dtype=np.int64)
    key = (array_of(log.role)[entries] * len(log.blocks) + array_of(log.block)[entries]) * max(1, len(log.lines)) + line
    order = np.lexsort((-sizes, key))
    entries, sizes, key, line = entries[order], sizes[order], key[order], line[order]
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    totals = np.add.reduceat(sizes, starts)
    counts = np.diff(starts, append=len(key))
    cells = [
        LedgerCell(
            role=ROLES[log.role[entries[start]]],
            block=log.blocks[log.block[entries[start]]],
            line=log.lines[line[start]] if log.lines else "",
            n_bytes=int(total),
            n_allocations=int(n),
            largest_op="" if log.born[entries[start]] == 0 else log.ops[log.op[entries[start]]],
        )
        for start, total, n in zip(starts, totals, counts)
    ]
    return tuple(sorted(cells, key=lambda cell: -cell.n_bytes))


PLURAL: dict[Role, str] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "optimizer state": "optimizer state",
    "input": "inputs",
    "temporary": "temporaries",
    "saved activation": "saved activations",
    "recomputed": "recomputed activations",
    "gradient": "gradients",
    "unattributed": "bytes of no known tensor",
    "gathered parameter": "gathered parameters",
    "reduce-scatter buffer": "reduce-scatter buffers",
    "gradient bucket": "gradient buckets",
    "cuBLAS workspace": "workspaces of cuBLAS",
}


def place(at: Ledger) -> str:
    """The moment as a noun: `the end of forward in head`, `the recompute of layers.0`."""
    if at.phase is None or at.phase_share is None:
        return "the time before the step"
    if at.phase == "recompute":
        return f"the recompute of {at.phase_block}"
    if at.phase == "optimizer":
        return "the optimizer step"
    if at.phase == "between":
        return "the loop's own code between the phases"
    part = "middle"
    if at.phase_share < 0.1:
        part = "start"
    elif at.phase_share > 0.9:
        part = "end"
    moment = f"the {part} of {at.phase}"
    return f"{moment} in {at.at_block}" if at.at_block else moment


def in_place(at: Ledger) -> str:
    """The moment with its preposition: `at the end of forward in head`."""
    where = place(at)
    return f"at {where}" if where.startswith(("the start", "the end")) else f"in {where}"


def largest_roles(at: Ledger) -> list[tuple[Role, int]]:
    """Bytes by role, the largest first."""
    return sorted(((role, size) for role, size in at.by_role.items() if size), key=lambda item: -item[1])


def holders(at: Ledger) -> str:
    """The three roles that hold most, with their largest block: `gradient 8.0 MiB (most in head), input 2.0 MiB`."""
    parts = []
    for role, n_bytes in largest_roles(at)[:3]:
        most = next(cell for cell in at.cells if cell.role == role)
        place = most.block or most.line
        part = f"{role} {mib(n_bytes)}"
        if place:
            part += f" ({'most ' * (n_bytes > most.n_bytes)}in {place})"
        parts.append(part)
    return ", ".join(parts)
