"""Every k-th for the largest k that fits: a larger stride does not fit, and everything kept is tried first."""

from __future__ import annotations

import pytest

from explorer.errors import BadInput
from explorer.plan.arena.rivals.every_k import RIVAL
from explorer.record import Policy, Unit
from tests.plan.arena.situations import situation


def test_it_is_the_cheapest_stride_that_fits() -> None:
    case = situation("gpt")
    assert RIVAL.choose is not None
    assert RIVAL.choose(case, case.keep_all_bytes) == Policy()
    budget = int(0.8 * case.keep_all_bytes)
    policy = RIVAL.choose(case, budget)
    strides = [
        Policy(units=tuple(Unit(blocks=unit) for unit in case.units[::k])) for k in range(1, len(case.units) + 1)
    ]
    assert policy in strides
    assert all((case.peak_of(one) or 0) > budget for one in strides if len(one.units) < len(policy.units))


def test_what_no_stride_reaches_is_refused_with_the_least() -> None:
    assert RIVAL.choose is not None
    with pytest.raises(BadInput, match="The least that it reaches is"):
        RIVAL.choose(situation("gpt"), 1)
