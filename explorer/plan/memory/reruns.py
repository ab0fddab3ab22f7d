"""Blocks that a model runs again by itself, from counted calls.

Apart from plan/why/caveats.py, which knows forecasts: recording a step imports this file in every rank of a training.
"""

from __future__ import annotations

from collections.abc import Sequence

from explorer.plan.names import above, is_within, listed, outermost
from explorer.record.measurement import MeasuredBlock, Measurement


def self_checkpointing(run: Measurement) -> dict[str, float]:
    """The outermost blocks that ran again without being in the policy, and how often for each of their forwards."""
    return reruns_outside(run.blocks, run.spec.policy.blocks)


def checkpoints_itself(run: Measurement) -> bool:
    """Whether the model checkpoints anything. A checkpoint that is dead was called, and nothing ran again."""
    checkpoints = run.own_checkpointing
    return bool(self_checkpointing(run) or (checkpoints is not None and checkpoints.regions))


def reruns_outside(costs: Sequence[MeasuredBlock], ordered: Sequence[str]) -> dict[str, float]:
    """The same from the figures of blocks; `ordered`: the blocks of the policy.

    A block counts as run again if all called blocks inside it ran again, even if its own hooks stayed silent.
    """
    again = {
        cost.fqn: cost.n_recompute / max(cost.n_forward, 1)
        for cost in costs
        if cost.fqn and cost.n_recompute and not is_within(cost.fqn, *ordered)
    }
    # The nearest called blocks inside each called block. Containers that are never called are skipped.
    below: dict[str, list[str]] = {cost.fqn: [] for cost in costs if cost.fqn and cost.n_forward}
    for fqn in below:
        if (holder := next((name for name in above(fqn) if name in below), None)) is not None:
            below[holder].append(fqn)
    for fqn, inside in reversed(below.items()):
        if inside and all(name in again for name in inside):
            again.setdefault(fqn, min(again[name] for name in inside))
    return {fqn: again[fqn] for fqn in outermost(cost.fqn for cost in costs if cost.fqn in again)}


def in_words(run: Measurement) -> str:
    """`layers.0, layers.1 and 6 more ran again ×1, by the model itself`; the empty string: none does."""
    times_run = self_checkpointing(run)
    if not times_run:
        return ""
    times = sorted({f"×{value:.3g}" for value in times_run.values()})
    return f"{listed(tuple(times_run))} ran again {' or '.join(times)}, by the model itself"
