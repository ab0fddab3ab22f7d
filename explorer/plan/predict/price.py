"""The marginal price of every block: MiB of peak for a percent of recompute, if it were toggled now.

A measured timeline is replayed with one block changed, see changes.py. The other way round, what the measured recompute
left behind is held from the end of forward on. A block that is not alive at the peak costs FLOPs and moves no peak at
all: that is what the price shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from explorer.plan.memory.ledger import Bytes
from explorer.plan.names import is_within
from explorer.plan.predict.calls import saved_by_calls
from explorer.plan.predict.changes import changes_of, offsets_of, peak_with
from explorer.plan.predict.nesting import flat
from explorer.plan.predict.replay import FORWARD, Replay
from explorer.plan.predict.step_cost import rerun_flops
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Price
from explorer.record.policy import Unit


def prices(
    measurement: Measurement, blocks: Iterable[str] | None = None, *, graph: ModelGraph | None = None
) -> tuple[Price, ...]:
    """Prices of the kept `blocks` (by default every block that saves something) and of every recomputed unit.

    Blocks above, below or inside a recomputed unit have no price of their own: toggling one changes the unit. Empty
    where nothing can be replayed.

    Origin: predicted; calls.py lists the limits. Without `graph` FLOPs do not know where recompute stops
    early.
    """
    replay = Replay.of(measurement, graph)
    if replay is None:
        return ()
    units = measurement.spec.policy.units
    named = [fqn for unit in units for fqn in unit.blocks]
    wanted = [cost.fqn for cost in measurement.blocks if cost.saved_after_forward_bytes] if blocks is None else blocks
    priced = [_if_kept(measurement, replay, unit) for unit in units if not _nested(unit, named)]
    priced += [
        _if_recomputed(measurement, replay, fqn, graph)
        for fqn in dict.fromkeys(wanted)
        if fqn and not any(is_within(fqn, other) or is_within(other, fqn) for other in named)
    ]
    return tuple(price for price in priced if price is not None)


def _if_recomputed(measurement: Measurement, replay: Replay, fqn: str, graph: ModelGraph | None) -> Price | None:
    policy = measurement.spec.policy
    calls = saved_by_calls(replay, (fqn,), stops_early=policy.stops_early)
    if not any(len(call.entries) for call in calls) or fqn not in measurement.by_fqn:
        return None
    nest = flat(calls)
    simulated = changes_of(replay, nest, None, stash_bytes=0)  # or "stays" would read "+4.9 KiB"
    peak = peak_with(replay, simulated, nest, stash_bytes=0)
    total = measurement.total_flops
    return Price(
        blocks=(fqn,),
        toggle="recompute",
        peak_bytes=peak,
        peak_change_bytes=peak - int(replay.line.max()),
        share_of_step_flops=rerun_flops(measurement, graph, (fqn,), policy) / total if total else None,
    )


def _if_kept(measurement: Measurement, replay: Replay, unit: Unit) -> Price | None:
    costs = [measurement.by_fqn[fqn] for fqn in unit.blocks if fqn in measurement.by_fqn]
    spans = [
        span
        for span in measurement.phases
        if span.phase == "recompute" and any(is_within(span.block, fqn) for fqn in unit.blocks)
    ]
    if not spans or len(costs) < len(unit.blocks):
        return None
    ends = _forward_ends(replay, unit.blocks)
    line, changes = replay.line.copy(), []
    for span in spans:
        end = min(span.end_tick, len(line))
        # What is freed before backward allocates anything was made again for nothing, such as the block's output.
        begins = int(replay.births[np.searchsorted(replay.births, end)])
        inside = np.flatnonzero((replay.born >= span.first_tick) & (replay.born < end) & (replay.died >= begins))
        left = int(replay.size[inside].sum())
        before = ends[ends < span.first_tick]
        start = int(before.max()) + 1 if len(before) else span.first_tick
        changes.append((start, span.first_tick, left))
        for first, again in _made_twice(measurement, replay, unit.blocks[-1], inside):
            size, died = int(replay.size[first]), int(replay.died[first])
            changes.append((start, min(died, span.first_tick), -size))
            if died >= span.first_tick:
                left -= size
                changes.append((end, min(died, int(replay.died[again])), -size))
        line[span.first_tick : end] = replay.line[span.first_tick - 1] + left
    bounds, offsets = offsets_of(np.array(changes, dtype=np.int64).T, len(line))
    peak = int((np.maximum.reduceat(line, bounds) + offsets).max())
    total = measurement.total_flops
    return Price(
        blocks=unit.blocks,
        toggle="keep",
        peak_bytes=peak,
        peak_change_bytes=peak - int(replay.line.max()),
        share_of_step_flops=sum(cost.recompute_flops for cost in costs) / total if total else None,
    )


def _made_twice(measurement: Measurement, replay: Replay, fqn: str, made: Bytes) -> list[tuple[int, int]]:
    """Pairs of an output that others hold and its copy among `made`; a kept block has only one of both."""
    log, calls = measurement.allocations, replay.calls.get(fqn, [])
    if log is None or len(calls) != 1:
        return []

    def kind(entry: int) -> tuple[int, int, int]:
        return log.n_bytes[entry], log.op[entry], log.block[entry]

    last = {kind(entry): entry for entry in made.tolist()}
    return [(output, last[kind(output)]) for output in calls[0].outputs if kind(output) in last]


def _forward_ends(replay: Replay, fqns: Sequence[str]) -> Bytes:
    """Ticks of the unit's own forward events: births, and frees before another block allocates."""
    here = np.concatenate([replay.below(fqn) for fqn in fqns])
    born, died = replay.born[here], replay.died[here]
    forward = (replay.phase[born] == FORWARD) & (born > 0)
    births = np.sort(born[forward])
    # Of each free: the unit's last birth before it, and the next birth of anyone after that.
    last = births[np.maximum(np.searchsorted(births, died[forward]) - 1, 0)]
    following = replay.births[np.searchsorted(replay.births, last, side="right")]
    frees = died[forward][died[forward] < following]
    return np.concatenate([births, frees])


def _nested(unit: Unit, named: Sequence[str]) -> bool:
    """True if another unit lies above or below this unit."""
    others = [fqn for fqn in named if fqn not in unit.blocks]
    return any(is_within(fqn, other) or is_within(other, fqn) for fqn in unit.blocks for other in others)
