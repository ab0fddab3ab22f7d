"""The best number of segments is the best of all numbers."""

from __future__ import annotations

import pytest

from explorer.errors import BadInput
from explorer.plan.arena.rivals.checkpoint_sequential import RIVAL
from tests.plan.arena.situations import choice, situation


def test_the_best_number_of_segments_is_the_best_of_all() -> None:
    case, share = situation("mlp"), 0.75
    best = choice("checkpoint-sequential", "mlp", share)
    assert best is not None
    blocks = [fqn for unit in case.units for fqn in unit]
    every = []
    for n_segments in range(1, len(blocks) + 1):
        size = len(blocks) // n_segments
        every.append(case.segments(tuple(blocks[i * size : (i + 1) * size]) for i in range(n_segments - 1)))
    fitting = [policy for policy in every if (case.peak_of(policy) or 0) <= share * case.keep_all_bytes]
    assert best in fitting
    ratios = [case.forecaster.forecast(policy).time_ratio for policy in fitting]
    assert case.forecaster.forecast(best).time_ratio == min(ratio for ratio in ratios if ratio is not None)


def test_blocks_that_do_not_hand_on_have_no_segments() -> None:
    case = situation("unet")
    assert RIVAL.choose is not None
    with pytest.raises(BadInput, match="no segments"):
        RIVAL.choose(case, case.keep_all_bytes)
