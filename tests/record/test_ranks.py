"""Ranks of one step side by side: the fullest speaks for all, and one without a file is missing."""

from __future__ import annotations

import msgspec

from explorer.record.measurement import RecordedRanks
from tests.view.builders import MIB, Chain, measured


def test_the_fullest_rank_speaks_for_all() -> None:
    small, large = (
        msgspec.structs.replace(measured(Chain(saved=size * MIB)), rank=rank) for rank, size in ((0, 4), (2, 40))
    )
    ranks = RecordedRanks(ranks=(small, large), n_ranks=4, recorded_in="train.py:42, step 2")
    assert ranks.fullest is large and ranks.by_rank == {0: small, 2: large} and ranks.missing == (1, 3)
    assert ranks.spec.model.target.endswith("train.py:42, step 2") and ranks.spec.policy == large.spec.policy
    assert ranks.headlines() == {
        "n_ranks": 4, "fullest_rank": 2, "complete": True,
        "held_peak_bytes": large.held_peak_bytes, "step_peak_bytes": large.step_peak_bytes,
    }  # fmt: skip
