"""Schedules as text, their orders of actions, and the laws that every schedule keeps."""

from __future__ import annotations

import csv
from collections import Counter

import pytest
from hypothesis import given
from hypothesis.strategies import builds, integers, lists, sampled_from

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.actions import (
    Action,
    check_rows,
    execution_order,
    format_rows,
    parse_rows,
    to_csv,
)
from explorer.plan.pipeline.orders import gpipe, looped_bfs, one_f_one_b
from explorer.plan.pipeline.schedules import SCHEDULES, default_ranks, rows_of
from explorer.record.run import PipelinePlan

ACTIONS = builds(Action, integers(0, 40), sampled_from("FBIW"), integers(0, 40))
ROWS = lists(lists(ACTIONS, min_size=1, max_size=9).map(tuple), min_size=1, max_size=5).map(tuple)


@given(rows=ROWS)
def test_rows_survive_csv_and_text(rows: tuple[tuple[Action, ...], ...]) -> None:
    assert parse_rows(csv.reader(to_csv(rows).splitlines())) == rows
    assert parse_rows(format_rows(rows)) == rows


def test_every_bad_cell_is_named_at_once() -> None:
    with pytest.raises(InvalidPlan) as caught:
        parse_rows([["0F0", "0X1"], ["F1"]])
    assert "'0X1' (rank 0, cell 1)" in str(caught.value)
    assert "'F1' (rank 1, cell 0)" in str(caught.value)


@given(n_ranks=integers(1, 6), n_microbatches=integers(1, 9))
def test_one_f_one_b_keeps_few_in_flight(n_ranks: int, n_microbatches: int) -> None:
    for rank, row in enumerate(one_f_one_b(n_ranks, n_microbatches)):
        flying = most = 0
        for action in row:
            flying += 1 if action.kind == "F" else -1
            most = max(most, flying)
        assert most == min(n_microbatches, n_ranks - rank)


def test_the_lists_read_as_in_the_papers() -> None:
    assert format_rows(gpipe(2, 2)) == (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1F1", "1B0", "1B1"))
    assert format_rows(one_f_one_b(2, 3)) == (
        ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2"),
        ("1F0", "1B0", "1F1", "1B1", "1F2", "1B2"),
    )
    assert format_rows(looped_bfs(1, 2)) == (("0F0", "0F1", "1F0", "1F1", "1B1", "1B0", "0B1", "0B0"),)


TWO_STAGES = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([["0F0", "0F0", "0F1", "0B0", "0B1"], TWO_STAGES[1]], "0F0 appears 2 times"),
        ([["0F0", "0F1", "0B0"], TWO_STAGES[1]], "0B1 is missing"),
        ([["0F1", "0B0", "0B1"], TWO_STAGES[1]], "0F0 is missing"),
        ([["0F0", "0F1", "0B0", "0I1"], TWO_STAGES[1]], "0W1 is missing"),
        ([["0F0", "0F1", "0B0", "0B1", "0I1", "0W1"], TWO_STAGES[1]], "0B1 is there beside"),
        ([["0F0", "0B0", "0B1", "0F1"], TWO_STAGES[1]], "0B1 comes before 0F1 on rank 0"),
        ([["0F0", "0F1", "0B0", "0W1", "0I1"], TWO_STAGES[1]], "0W1 comes before 0I1 on rank 0"),
        ([["0F0", "0F1", "0B0", "0B1", "1B1"], ["1F0", "1B0", "1F1"]], "stage 1 is on ranks 0 and 1"),
        ([TWO_STAGES[0], [*TWO_STAGES[1], "2F0"]], "2F0 names stage 2 of 2"),
        ([[*TWO_STAGES[0], "0F2"], TWO_STAGES[1]], "0F2 names microbatch 2 of 2"),
    ],
)
def test_each_rule_names_the_action(rows: list[list[str]], words: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        check_rows(parse_rows(rows), n_stages=2, n_microbatches=2)
    assert words in str(caught.value)


def test_a_deadlock_says_who_waits_for_what() -> None:
    rows = parse_rows([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]])
    with pytest.raises(InvalidPlan) as caught:
        check_rows(rows, n_stages=2, n_microbatches=2)
    assert "rank 0 waits at 0B0 for 1B0" in str(caught.value)
    assert "rank 1 waits at 1F1 for 0F1" in str(caught.value)


def test_the_order_respects_every_row_and_every_need() -> None:
    rows = one_f_one_b(3, 4)
    order = execution_order(rows)
    for row in rows:
        assert [action for action in order if action in row] == list(row)
    place = {action: index for index, action in enumerate(order)}
    for action in order:
        if action.kind == "F" and action.stage:
            assert place[action._replace(stage=action.stage - 1)] < place[action]
        if action.kind == "B" and action.stage < 2:
            assert place[action._replace(stage=action.stage + 1)] < place[action]


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
