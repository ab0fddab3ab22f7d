"""What a model ran again by itself: forwards inside backward that no policy ordered."""

from __future__ import annotations

from collections.abc import Sequence

from explorer.plan.names import above, is_within, listed
from explorer.record.measurement import MeasuredBlock, Measurement


def own_reruns(run: Measurement) -> dict[str, float]:
    """The outermost blocks that ran again without being in the policy, and how often for each of their forwards."""
    return reruns_beside(run.blocks, run.spec.policy.blocks)


def reruns_beside(costs: Sequence[MeasuredBlock], ordered: Sequence[str]) -> dict[str, float]:
    """The same from what the blocks cost. A block whose called blocks all ran again is meant, where its own hooks
    stayed silent.
    """
    again = {
        cost.fqn: cost.n_recompute / max(cost.n_forward, 1)
        for cost in costs
        if cost.fqn and cost.n_recompute and not any(is_within(cost.fqn, fqn) for fqn in ordered)
    }
    called = [cost.fqn for cost in costs if cost.fqn and cost.n_forward]
    below = _called_below(called)
    for fqn in reversed(called):
        if below[fqn] and all(one in again for one in below[fqn]):
            again.setdefault(fqn, min(again[one] for one in below[fqn]))
    in_order = (cost.fqn for cost in costs if cost.fqn in again)
    return {fqn: again[fqn] for fqn in in_order if not any(holder in again for holder in above(fqn))}


def in_words(run: Measurement) -> str:
    """`layers.0, layers.1 and 6 more ran again ×1, by the model itself`; the empty string: none does."""
    times_run = own_reruns(run)
    if not times_run:
        return ""
    times = sorted({f"×{value:.3g}" for value in times_run.values()})
    return f"{listed(tuple(times_run))} ran again {' or '.join(times)}, by the model itself"


def _called_below(called: list[str]) -> dict[str, list[str]]:
    """Of each the nearest called blocks inside; containers that are never called are looked through."""
    below: dict[str, list[str]] = {fqn: [] for fqn in called}
    for fqn in called:
        holder = next((one for one in above(fqn) if one in below), None)
        if holder is not None:
            below[holder].append(fqn)
    return below
