"""What a rival is told of a step: its units, what they save and take, and what any policy would hold."""

from __future__ import annotations

import pytest

from explorer.errors import BadInput
from explorer.plan.policy.presets import preset
from explorer.record import Policy
from tests.plan.arena.situations import situation


def test_everything_kept_is_what_budgets_are_shares_of() -> None:
    case = situation("mlp")
    assert case.peak_of(Policy()) == case.keep_all_bytes == case.run.step_peak_bytes
    assert (case.peak_of(preset("all", case.graph)) or 0) < case.keep_all_bytes


def test_units_have_bytes_and_time() -> None:
    case = situation("mlp")
    assert all(case.saved_bytes(unit) > 0 and case.forward_ms(unit) > 0 for unit in case.units)
    first, second = case.units[:2]
    assert case.saved_bytes((*first, *second)) == case.saved_bytes(first) + case.saved_bytes(second)


def test_a_segment_is_parted_where_blocks_do_not_hand_on() -> None:
    case = situation("mlp")
    (a,), (b,), (c,) = case.units[:3]
    assert [unit.blocks for unit in case.segments([(a, b, c)]).units] == [(a, b, c)]
    assert [unit.blocks for unit in case.segments([(a, c)]).units] == [(a,), (c,)]


def test_the_cheapest_that_fits_and_otherwise_the_least() -> None:
    case = situation("mlp")
    everything = preset("all", case.graph)
    assert case.cheapest_that_fits([everything, Policy()], case.keep_all_bytes) == Policy()
    assert case.cheapest_that_fits([everything, Policy()], case.keep_all_bytes - 1) == everything
    with pytest.raises(BadInput, match="The least that it reaches is"):
        case.cheapest_that_fits([Policy()], 1)
