"""Every k-th block is recomputed, for the largest k that the forecast says fits."""

from __future__ import annotations

from explorer.plan.arena.rival import Rival, Situation
from explorer.record.policy import Policy, Unit


def _choose(situation: Situation, budget_bytes: int) -> Policy:
    units = situation.units
    strides = range(1, len(units) + 1)
    policies = (Policy(units=tuple(Unit(blocks=unit) for unit in units[::k])) for k in strides)
    return situation.cheapest_that_fits((Policy(), *policies), budget_bytes)


RIVAL = Rival(title="Every k-th", source="a stride, as torchtitan's and Hugging Face's", place=2, choose=_choose)
