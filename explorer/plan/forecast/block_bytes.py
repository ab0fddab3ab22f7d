"""What a timeline that nobody measured says of each block: its bytes, everything below included."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from explorer.plan.memory.ledger import Bytes, Mask, alive, array_of, peak_tick
from explorer.plan.names import lineage
from explorer.record.allocations import ROLES, Allocations
from explorer.record.measurement import MeasuredBlock, Measurement

SAVED = ROLES.index("saved activation")


def with_bytes(run: Measurement, costs: Sequence[MeasuredBlock]) -> tuple[MeasuredBlock, ...]:
    """`costs` with the bytes that the timeline of `run` holds for each block, at the end of forward and at the peak."""
    log, border = run.allocations, run.forward_end_tick
    assert log is not None and border is not None, "whoever puts a timeline together has seen forward end"
    saved = array_of(log.role) == SAVED
    nothing = np.zeros(len(saved), dtype=np.bool_)
    at_border, at_peak = nothing.copy(), nothing.copy()
    at_border[alive(log, border)] = at_peak[alive(log, peak_tick(log))] = True
    kept, most = _by_fqn(log, at_border & saved), _by_fqn(log, at_peak)
    return tuple(
        msgspec.structs.replace(
            cost, saved_after_forward_bytes=kept.get(cost.fqn, 0), at_peak_bytes=most.get(cost.fqn, 0)
        )
        for cost in costs
    )


def _by_fqn(log: Allocations, which: Mask) -> dict[str, int]:
    own: Bytes = np.zeros(len(log.blocks), dtype=np.int64)
    np.add.at(own, array_of(log.block)[which], array_of(log.n_bytes)[which])
    by_fqn: dict[str, int] = {}
    for fqn, n_bytes in zip(log.blocks, own.tolist()):
        for block in lineage(fqn):
            by_fqn[block] = by_fqn.get(block, 0) + n_bytes
    return by_fqn
