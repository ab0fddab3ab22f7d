"""The package ckptplan, 0.1.0rc1: it is listed because people find it, and cannot take part."""

from __future__ import annotations

from explorer.errors import BadInput
from explorer.plan.arena.rival import Rival, Situation
from explorer.record.policy import Policy


def _choose(situation: Situation, budget_bytes: int) -> Policy:
    raise BadInput(
        "It plans CUDA models without dropout whose blocks their author declares by hand, to a budget that is the sum "
        "of the blocks' activations and not the peak."
    )


RIVAL = Rival(title="ckptplan", source="ckptplan 0.1.0rc1 on PyPI", place=10, choose=_choose)
