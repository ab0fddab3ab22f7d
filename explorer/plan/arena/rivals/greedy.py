"""Blocks by what they save for a millisecond of recompute, most first, until the forecast says that it fits."""

from __future__ import annotations

from explorer.errors import BadInput
from explorer.plan.arena.rival import Rival, Situation
from explorer.plan.sizes import mib
from explorer.record.policy import Policy, Unit


def _choose(situation: Situation, budget_bytes: int) -> Policy:
    def worth(unit: tuple[str, ...]) -> float:
        return situation.saved_bytes(unit) / (situation.forward_ms(unit) or 1.0)

    order = sorted(situation.units, key=worth, reverse=True)
    peak = None
    for n in range(len(order) + 1):
        taken = set(order[:n])
        policy = Policy(units=tuple(Unit(blocks=unit) for unit in situation.units if unit in taken))
        peak = situation.peak_of(policy)
        if peak is not None and peak <= budget_bytes:
            return policy
    least = "" if peak is None else f": with every block taken the peak is {mib(peak)}"
    raise BadInput(f"It found nothing that fits{least}.")


RIVAL = Rival(title="Greedy", source="bytes for a millisecond, block by block", place=5, choose=_choose)
