"""Who holds the peak that a policy would have: every byte of it by role and block, as if it had been measured."""

from __future__ import annotations

import msgspec
import numpy as np

from explorer.plan.forecast.changes import Played, held_at, line_with, reruns
from explorer.plan.forecast.nesting import Nest
from explorer.plan.forecast.replay import Replay
from explorer.plan.memory.ledger import cells_of, ledger
from explorer.record.ledger import Ledger, LedgerCell
from explorer.record.measurement import Measurement


def ledger_at_peak(
    baseline: Measurement, replay: Replay, played: Played, nest: Nest, names: tuple[str, ...], *, stash_bytes: int
) -> Ledger:
    """`names`: of each call of `nest` the first block of its unit. What a rerun makes is its own, whatever the role."""
    assert baseline.allocations is not None, "it was replayed"
    line = line_with(replay, played, nest, stash_bytes=stash_bytes)
    tick, peak = int(line.argmax()), int(line.max())
    again = [
        name
        for name, (at, most) in zip(names, reruns(replay, played, nest, stash_bytes=stash_bytes))
        if (at, most) == (tick, peak)
    ]
    cells = cells_of(baseline.allocations, np.flatnonzero(held_at(replay, played, tick)))
    rest = peak - sum(cell.n_bytes for cell in cells)
    measured = ledger(baseline, tick)
    if again:
        cells += (LedgerCell(role="recomputed", block=again[0], n_bytes=rest, n_allocations=0, largest_op=""),)
        measured = msgspec.structs.replace(measured, phase="recompute", phase_block=again[0])
    elif rest:  # states of generators that checkpoints keep
        cells += (LedgerCell(role="unattributed", block="", n_bytes=rest, n_allocations=0, largest_op=""),)
    return msgspec.structs.replace(measured, cells=tuple(sorted(cells, key=lambda cell: -cell.n_bytes)))
