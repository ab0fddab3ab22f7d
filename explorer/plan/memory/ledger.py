"""What is alive at a tick, by role and by block: what makes up a peak, exact to the byte."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from explorer.errors import BadInput
from explorer.plan.memory.series import alive, array_of, events, peak_tick
from explorer.record.allocations import ROLES, Allocations, Ledger, LedgerCell, PhaseSpan
from explorer.record.measurement import Measurement


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
    return Ledger(
        tick=at,
        phase=span.phase if span else None,
        phase_block=span.block if span else "",
        phase_share=_share(measurement.phases, span, at) if span else None,
        at_block=log.blocks[log.block[entry]] if entry >= 0 else "",
        is_peak=at == peak,
        cells=cells_of(log, alive(log, at)),
    )


def span_at(phases: tuple[PhaseSpan, ...], tick: int) -> PhaseSpan | None:
    """The span that `tick` lies in; None: outside all of them."""
    return next((span for span in phases if span.first_tick <= tick < span.end_tick), None)


def _share(phases: tuple[PhaseSpan, ...], span: PhaseSpan, tick: int) -> float:
    """How far the phase had come; backward is one stretch, the recomputes inside it included."""
    first, last = span.first_tick, span.end_tick - 1
    if span.phase == "backward":
        at = phases.index(span)
        stretch = ("backward", "recompute")
        begin = next((i + 1 for i in range(at, -1, -1) if phases[i].phase not in stretch), 0)
        end = next((i for i in range(at, len(phases)) if phases[i].phase not in stretch), len(phases))
        first, last = phases[begin].first_tick, phases[end - 1].end_tick - 1
    return (tick - first) / max(last - first, 1)


def cells_of(log: Allocations, entries: NDArray[np.intp]) -> tuple[LedgerCell, ...]:
    """These entries by role and block, the largest cell first."""
    if not len(entries):
        return ()
    sizes = array_of(log.n_bytes)[entries]
    key = array_of(log.role)[entries] * len(log.blocks) + array_of(log.block)[entries]
    order = np.lexsort((-sizes, key))
    entries, sizes, key = entries[order], sizes[order], key[order]
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    totals = np.add.reduceat(sizes, starts)
    counts = np.diff(starts, append=len(key))
    cells = [
        LedgerCell(
            role=ROLES[int(key[start]) // len(log.blocks)],
            block=log.blocks[int(key[start]) % len(log.blocks)],
            n_bytes=int(total),
            n_allocations=int(n),
            largest_op="" if log.born[entries[start]] == 0 else log.ops[log.op[entries[start]]],
        )
        for start, total, n in zip(starts, totals, counts)
    ]
    return tuple(sorted(cells, key=lambda cell: -cell.n_bytes))
