"""What a rank recomputes under a cap: no cheaper choice fits, choices come in order of their price."""

from __future__ import annotations

import itertools

import pytest

from explorer.plan.pipeline.schedules import rows_of
from explorer.plan.planners.rank_choice import RankChoices, _cheapest_first
from explorer.record.run import PipelinePlan
from tests.plan.planners.test_joint import drawn

PROFILE = drawn(3)
N = len(PROFILE.blocks)
SHAPE = PipelinePlan(stages=((), ()), n_microbatches=2, schedule="GPipe")
BORDERS = (0, N // 2, N)


def choices(cap_bytes: int, worth: bool = True) -> RankChoices:
    return RankChoices(PROFILE, SHAPE, rows_of(SHAPE), [worth] * N, cap_bytes)


def more_ms(chosen: frozenset[int]) -> float:
    blocks = (PROFILE.blocks[k] for k in chosen)
    return sum(one.recomputed.backward_ms - one.kept.backward_ms for one in blocks)


def test_with_room_nothing_is_recomputed() -> None:
    choice = choices(2**60).under(BORDERS)
    assert choice.recomputed == frozenset() and len(choice.costs) == len(choice.rank_bytes) == 2


@pytest.mark.parametrize("share", [0.95, 0.85, 0.75])
def test_no_cheaper_choice_of_a_rank_fits(share: float) -> None:
    cap = int(share * max(choices(2**60).under(BORDERS).rank_bytes))
    known = choices(cap)
    chosen = known.under(BORDERS)
    for stage, (first, end) in enumerate(zip(BORDERS, BORDERS[1:])):
        own = frozenset(k for k in chosen.recomputed if first <= k < end)
        places = range(first, end)
        every = [frozenset(taken) for n in range(len(places) + 1) for taken in itertools.combinations(places, n)]
        fitting = [one for one in every if known._tried(((stage, first, end),), one).rank_bytes[0] <= cap]
        if fitting:
            assert chosen.rank_bytes[stage] <= cap
            assert more_ms(own) == pytest.approx(min(map(more_ms, fitting)))


def test_what_is_not_worth_it_is_never_recomputed_and_nothing_fits_nowhere() -> None:
    assert choices(1, worth=False).under(BORDERS).recomputed == frozenset()
    assert choices(1).stage_ms(0, 0, N // 2) == float("inf") and choices(2**60).stage_ms(0, 0, N // 2) > 0


def test_all_subsets_come_in_order_of_their_price() -> None:
    price = [3.0, 1.0, 2.5, 0.5]
    subsets = list(_cheapest_first(range(4), price))
    sums = [sum(price[k] for k in one) for one in subsets]
    assert len(set(subsets)) == 16 and sums == sorted(sums)
    assert list(_cheapest_first([], [])) == [frozenset()]
