"""Rotor plans chains, and says where a model is none."""

from __future__ import annotations

import pytest

from explorer.errors import BadInput
from explorer.plan.arena.rivals.rotor import RIVAL
from tests.plan.arena.situations import situation


def test_where_it_cannot_plan_it_says_why() -> None:
    case = situation("unet")
    assert RIVAL.choose is not None
    with pytest.raises(BadInput, match="chains"):
        RIVAL.choose(case, case.keep_all_bytes)


def test_on_a_chain_less_room_never_means_less_recompute() -> None:
    case = situation("mlp")
    assert RIVAL.choose is not None
    n_recomputed = [len(RIVAL.choose(case, int(share * case.keep_all_bytes)).blocks) for share in (2.0, 0.9, 0.75)]
    assert n_recomputed == sorted(n_recomputed) and n_recomputed[-1] > 0
