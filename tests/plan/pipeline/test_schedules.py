"""Generated schedules keep the laws that every schedule must keep."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis.strategies import integers, sampled_from

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.actions import format_rows
from explorer.plan.pipeline.schedules import SCHEDULES, default_ranks, rows_of
from explorer.record.run import PipelinePlan


def plan(schedule: str, n_stages: int, n_microbatches: int, **fields: object) -> PipelinePlan:
    stages = tuple((f"blocks.{j}",) for j in range(n_stages))
    return PipelinePlan(stages=stages, n_microbatches=n_microbatches, schedule=schedule, **fields)  # type: ignore[arg-type]


@given(schedule=sampled_from(tuple(SCHEDULES)), n_ranks=integers(1, 5), n_rounds=integers(1, 3))
def test_each_stage_does_each_microbatch_once_each_way(schedule: str, n_ranks: int, n_rounds: int) -> None:
    n_stages = n_ranks * (1 if schedule in ("GPipe", "1F1B") else 2)
    n_microbatches = 2 * n_ranks * n_rounds
    rows = rows_of(plan(schedule, n_stages, n_microbatches))
    assert len(rows) == n_ranks
    done = Counter(action for row in rows for action in row)
    assert set(done.values()) == {1}
    for stage in range(n_stages):
        for i in range(n_microbatches):
            kinds = sorted(action.kind for action in done if action.stage == stage and action.microbatch == i)
            assert kinds in (["B", "F"], ["F", "I", "W"])


def test_only_zero_bubble_schedules_split_the_backward() -> None:
    for schedule in SCHEDULES:
        n_stages = 4
        kinds = {action.kind for row in rows_of(plan(schedule, n_stages, 8)) for action in row}
        assert ("W" in kinds) == (SCHEDULES[schedule].splits_backward)


def test_default_ranks_hold_two_stages_where_a_schedule_needs_them() -> None:
    assert {name: default_ranks(name, 4) for name in SCHEDULES} == {
        name: 4 if schedule.shape == "single" else 2 for name, schedule in SCHEDULES.items()
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (plan("1F1B", 4, 2), "at least as many microbatches as stages: 2 for 4 stages"),
        (plan("DualPipeV", 4, 3), "at least as many microbatches"),
        (plan("GPipe", 4, 4, n_ranks=2), "one stage a rank; 4 stages are asked on 2 ranks"),
        (plan("Interleaved1F1B", 3, 4, n_ranks=3), "two or more stages on every rank"),
        (plan("ZBVZeroBubble", 6, 6, n_ranks=2), "exactly two stages a rank"),
        (plan("Interleaved1F1B", 8, 9), "do not divide"),
        (plan("1F1b", 2, 2), "Did you mean 1F1B"),
        (plan("GPipe", 0, 2), "needs stages"),
    ],
)
def test_impossible_plans_are_refused_with_their_numbers(wrong: PipelinePlan, words: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        rows_of(wrong)
    assert words in str(caught.value)


def test_own_actions_are_taken_as_they_are() -> None:
    own = (("0F0", "0F1", "0B1", "0B0"),)
    assert format_rows(rows_of(plan("GPipe", 1, 2, actions=own))) == own
