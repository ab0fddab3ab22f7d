"""Cost of each block with its children: bytes from the timeline, FLOPs and calls from the tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from explorer.engine.bench.timeline import as_ints
from explorer.engine.bench.timing import BlockSamples
from explorer.engine.watch.tracker import BACKWARD, FORWARD, OP_COLUMNS, RECOMPUTE, Tracker
from explorer.record.allocations import ROLES, Allocations, PhaseSpan
from explorer.record.measurement import MeasuredBlock
from explorer.record.policy import Policy

SAVED = ROLES.index("saved activation")


def block_costs(
    tracker: Tracker, log: Allocations, phases: Sequence[PhaseSpan], policy: Policy, samples: Mapping[str, BlockSamples]
) -> tuple[MeasuredBlock, ...]:
    """Costs of all blocks in module order, the model itself first. FLOPs are counted, bytes measured."""
    tree = _Tree(tracker.fqns)
    size, born, died = (np.asarray(values) for values in (log.n_bytes, log.born, log.died))
    role, block = np.asarray(log.role), np.asarray(log.block)
    peak = log.peak_tick
    ends = [span.end_tick - 1 for span in phases if span.phase == "forward"]
    saved = (role == SAVED) & (born <= ends[-1]) & (died > ends[-1]) if ends else np.zeros(len(size), dtype=bool)

    def per_block(which: np.ndarray) -> list[int]:
        own = np.zeros(len(tracker.fqns), dtype=np.int64)
        np.add.at(own, block[which], size[which])
        return tree.inclusive(own.tolist())

    def counted(phase: int) -> list[int]:
        return [tracker.flops.get((phase, i), 0) for i in range(len(tracker.fqns))]

    saved_bytes, peak_bytes = per_block(saved), per_block((born <= peak) & (died > peak))
    forward, recompute = counted(FORWARD), counted(RECOMPUTE)
    skipped = tree.inclusive(_skipped(tracker, tree, policy, forward, recompute))
    flops = [tree.inclusive(own) for own in (forward, recompute, counted(BACKWARD))]
    nothing = BlockSamples()
    costs = (
        MeasuredBlock(
            fqn=fqn,
            n_forward=tracker.n_forward[i],
            n_recompute=tracker.n_recompute[i],
            saved_after_forward_bytes=saved_bytes[i],
            at_peak_bytes=peak_bytes[i],
            forward_flops=flops[0][i],
            recompute_flops=flops[1][i],
            backward_flops=flops[2][i],
            skipped_flops=skipped[i],
        )
        for i, fqn in enumerate(tracker.fqns)
    )
    return tuple(with_times(cost, samples.get(cost.fqn, nothing)) for cost in costs)


def with_times(cost: MeasuredBlock, samples: BlockSamples) -> MeasuredBlock:
    """`cost` with the block's times, operators and saved tensors from `samples`."""
    operators = samples.operators
    return msgspec.structs.replace(
        cost,
        forward=samples.forward,
        recompute=samples.recompute,
        operator_ms={} if operators is None else dict(operators.ms),
        n_operators=None if operators is None else operators.n_calls,
        n_saved=None if operators is None else operators.n_saved,
    )


def uncounted(tracker: Tracker) -> dict[str, int]:
    """Calls of operators without a FLOP formula. The optimizer's operators are left out: no FLOPs include them."""
    names, _, phases, *_ = as_ints(tracker.ops).reshape(-1, len(OP_COLUMNS)).T
    calls = np.bincount(names[phases <= BACKWARD], minlength=len(tracker.op_names))
    return {tracker.op_names[i]: int(calls[i]) for i in tracker.uncounted if calls[i]}


class _Tree:
    """Blocks by number; a parent comes before its children."""

    def __init__(self, fqns: Sequence[str]) -> None:
        number = {fqn: i for i, fqn in enumerate(fqns)}
        self.parent = [number.get(fqn.rpartition(".")[0], 0) for fqn in fqns]

    def inclusive(self, own: Sequence[int]) -> list[int]:
        """Each block's values plus the values of all blocks below."""
        total = list(own)
        for i in range(len(total) - 1, 0, -1):
            total[self.parent[i]] += total[i]
        return total

    def above(self, i: int) -> list[int]:
        """The block and its ancestors, innermost first."""
        line = [i]
        while i:
            i = self.parent[i]
            line.append(i)
        return line


def _skipped(
    tracker: Tracker, tree: _Tree, policy: Policy, forward: Sequence[int], recompute: Sequence[int]
) -> list[int]:
    """FLOPs of each block's forward that the innermost unit around the block should rerun, and that did not rerun."""
    scale: dict[int, float] = {}
    number = tracker.scopes.index
    for unit in policy.units:
        members = [number[fqn] for fqn in unit.blocks if fqn in number and tracker.n_forward[number[fqn]]]
        runs = [tracker.n_recompute[i] / tracker.n_forward[i] for i in members]
        scale.update((i, max(runs)) for i in members)
    skipped = []
    for i in range(len(tracker.fqns)):
        around = next((block for block in tree.above(i) if block in scale), None)
        expected = forward[i] * scale[around] if around is not None else 0
        skipped.append(max(0, round(expected) - recompute[i]))
    return skipped
