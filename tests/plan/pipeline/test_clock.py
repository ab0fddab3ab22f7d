"""The clock that plays schedules: closed forms from the papers, critical path, memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.actions import Action, parse_rows
from explorer.plan.pipeline.clock import UNIT_MS, forecast, is_checkpointed, simulate
from explorer.plan.pipeline.orders import gpipe, interleaved, one_f_one_b
from explorer.plan.pipeline.schedules import rows_of
from explorer.record.run import PipelinePlan
from tests.plan.pipeline.stage_cost import cost


@given(n_ranks=integers(1, 6), n_microbatches=integers(1, 8))
def test_bubble_of_gpipe_is_the_closed_form(n_ranks: int, n_microbatches: int) -> None:
    played = simulate(gpipe(n_ranks, n_microbatches))
    assert played.bubble_fraction == pytest.approx((n_ranks - 1) / (n_microbatches + n_ranks - 1))


@given(n_ranks=integers(1, 6), extra=integers(0, 6))
def test_bubble_of_one_f_one_b_is_the_closed_form(n_ranks: int, extra: int) -> None:
    n_microbatches = n_ranks + extra
    played = simulate(one_f_one_b(n_ranks, n_microbatches))
    assert played.bubble_fraction == pytest.approx((n_ranks - 1) / (n_microbatches + n_ranks - 1))


@pytest.mark.parametrize(
    ("schedule", "bubble", "in_flight"),
    [
        ("GPipe", 3 / 11, [8, 8, 8, 8]),
        ("1F1B", 3 / 11, [4, 3, 2, 1]),
        ("Interleaved1F1B", 3 / 19, [11, 9, 7, 5]),
        ("LoopedBFS", 3 / 19, [16, 16, 16, 16]),
        ("InterleavedZeroBubble", 1 / 17, [8, 8, 8, 8]),
        ("ZBVZeroBubble", 1 / 17, [8, 8, 8, 8]),
        ("DualPipeV", 1 / 17, [9, 9, 9, 9]),
    ],
)
def test_four_ranks_and_eight_microbatches(schedule: str, bubble: float, in_flight: list[int]) -> None:
    n_stages = 4 if schedule in ("GPipe", "1F1B") else 8
    plan = PipelinePlan(stages=(("x",),) * n_stages, n_microbatches=8, schedule=schedule)
    played = simulate(rows_of(plan), lambda action: UNIT_MS[action.kind] * 4 / n_stages)
    assert played.bubble_fraction == pytest.approx(bubble)
    assert [use.n_in_flight for use in played.ranks] == in_flight


@given(n_microbatches=integers(1, 4), forward=floats(0.1, 9), backward=floats(0.1, 9))
def test_the_critical_path_is_as_long_as_the_step(n_microbatches: int, forward: float, backward: float) -> None:
    played = simulate(one_f_one_b(3, n_microbatches), lambda action: forward if action.kind == "F" else backward)
    by_name = {time.name: time for time in played.actions}
    path = [by_name[name] for name in played.critical_path]
    assert sum(time.duration_ms for time in path) == pytest.approx(played.makespan_ms)
    assert all(after.start_ms == before.end_ms for before, after in zip(path, path[1:]))


def test_nothing_starts_before_what_it_needs() -> None:
    played = simulate(interleaved(2, 4), lambda action: 1.0 + action.stage)
    ends = {(time.stage, time.kind, time.microbatch): time.end_ms for time in played.actions}
    for time in played.actions:
        if time.kind == "F" and time.stage:
            assert time.start_ms >= ends[time.stage - 1, "F", time.microbatch]
        if time.kind == "B" and time.stage < 3:
            assert time.start_ms >= ends[time.stage + 1, "B", time.microbatch]


def test_a_deadlock_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="deadlocks"):
        simulate(parse_rows([["0B0", "0F0"]]))


def test_which_microbatches_are_checkpointed() -> None:
    checkpointed = {
        mode: [is_checkpointed(mode, i, 3) for i in range(3)] for mode in ("always", "except_last", "never")
    }  # type: ignore[arg-type]
    assert checkpointed == {
        "always": [True, True, True],
        "except_last": [True, True, False],
        "never": [False, False, False],
    }


def test_a_split_backward_that_nobody_measured_is_two_halves() -> None:
    plan = PipelinePlan(stages=(("x",),) * 4, n_microbatches=4, schedule="ZBVZeroBubble")
    played = forecast(plan, tuple(cost(j) for j in range(4)))
    assert {(time.duration_ms, time.recompute_ms) for time in played.actions if time.kind in "IW"} == {(2.0, 1.0)}


def test_costs_must_match_the_stages() -> None:
    with pytest.raises(InvalidPlan, match="1 costs are given for 2 stages"):
        forecast(PipelinePlan(stages=(("x",), ("y",)), n_microbatches=2), (cost(0),))


def test_durations_by_action_reach_the_clock() -> None:
    played = simulate(gpipe(1, 2), lambda action: {"F": 1.0, "B": 5.0}[action.kind] + action.microbatch)
    assert played.makespan_ms == 1 + 2 + 5 + 6
    assert Action(0, "B", 1).kind == "B"
