"""Who holds the peak that a policy would have: every byte of it by role and block, as if it had been measured."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from explorer.plan.forecast.changes import Played, held_at
from explorer.plan.forecast.replay import Replay
from explorer.plan.memory.ledger import Bytes, cells_of, ledger
from explorer.record.allocations import Ledger, LedgerCell, Role
from explorer.record.measurement import Measurement


def ledger_at_peak(
    baseline: Measurement, replay: Replay, played: Played, line: Bytes, reruns: Iterable[tuple[str, int, int]]
) -> Ledger:
    """`line` is what would be held; `reruns`: of each call the block that runs again, the tick, and what is held then.

    What a rerun makes is its block's own, whatever its role will be.
    """
    assert baseline.allocations is not None, "it was replayed"
    tick, peak = int(line.argmax()), int(line.max())
    again = next((block for block, at, most in reruns if (at, most) == (tick, peak)), "")
    cells = cells_of(baseline.allocations, np.flatnonzero(held_at(replay, played, tick)))
    measured = ledger(baseline, tick)
    if again:
        measured = msgspec.structs.replace(measured, phase="recompute", phase_block=again)
    if rest := peak - sum(cell.n_bytes for cell in cells):  # beside a rerun: the generators' states that are kept
        role: Role = "recomputed" if again else "unattributed"
        cells += (LedgerCell(role=role, block=again, n_bytes=rest, n_allocations=0, largest_op=""),)
    return msgspec.structs.replace(measured, cells=tuple(sorted(cells, key=lambda cell: -cell.n_bytes)))
