"""The clock that simulates schedules: closed forms, critical path, memory by rank, and waits for transfers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers

from explorer.plan.pipeline.actions import format_rows
from explorer.plan.pipeline.clock import UNIT_MS, forecast, is_checkpointed, simulate
from explorer.plan.pipeline.measured import out_of_order, schedule_of, transfers
from explorer.plan.pipeline.orders import gpipe, interleaved, one_f_one_b
from explorer.plan.pipeline.schedules import SCHEDULES, rows_of
from explorer.record.pipeline_cost import ActionCost, SplitCost, StageCost
from explorer.record.pipeline_run import ActionTime
from explorer.record.run import PipelinePlan
from explorer.view.pipeline.gantt import link_table

ROWS = one_f_one_b(2, 1)


def cost(stage: int, **fields: int) -> StageCost:
    kept = ActionCost(forward_ms=1.0, backward_ms=2.0, saved_bytes=100, forward_extra_bytes=110,
                      backward_extra_bytes=20, first_backward_extra_bytes=30)  # fmt: skip
    again = ActionCost(forward_ms=1.0, backward_ms=3.0, recompute_ms=1.0, saved_bytes=10, forward_extra_bytes=110,
                       backward_extra_bytes=115, first_backward_extra_bytes=125)  # fmt: skip
    return StageCost(stage=stage, kept=kept, recomputed=again, parameter_bytes=7, gradient_bytes=7, **fields)


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


def test_memory_of_one_stage_by_hand() -> None:
    plan = PipelinePlan(stages=(("x",),), n_microbatches=2, schedule="GPipe", checkpoint="never")
    (memory,) = forecast(plan, (cost(0),)).memory
    # 7 parameters; F0 +100, F1 +100; B0 from 207 up by 30; then 7 gradients more and 100 less.
    assert list(memory.held_bytes) == [7, 117, 107, 217, 207, 237, 114, 134, 14]
    assert (memory.peak_bytes, memory.peak_action) == (237, "0B0")


def test_memory_of_a_split_backward_by_hand() -> None:
    """Two stages of one rank: what the second sends stays in the rank, and takes the place of a buffer."""
    split = SplitCost(input_ms=1.0, weight_ms=3.0, weight_recompute_ms=2.0, input_extra_bytes=40, owed_bytes=15,
                      weight_extra_bytes=60, first_weight_extra_bytes=80)  # fmt: skip
    first, second = cost(0, gradient_receive_bytes=5), cost(1, receive_bytes=5)
    again = msgspec.structs.replace(second.recomputed, sent_gradient_bytes=6, split=split)
    none = SplitCost(input_ms=0.0, weight_ms=2.0, weight_extra_bytes=20, first_weight_extra_bytes=30)
    costs = (
        msgspec.structs.replace(first, recomputed=msgspec.structs.replace(first.recomputed, split=none)),
        msgspec.structs.replace(second, recomputed=again),
    )
    rows = (("0F0", "1F0", "1I0", "0I0", "1W0", "0W0"),)
    plan = PipelinePlan(stages=(("x",), ("y",)), n_microbatches=1, schedule="ZBVZeroBubble", actions=rows)
    played = forecast(plan, costs)
    (memory,) = played.memory
    # 14 parameters, 10 buffers. 0F0 +10 -5, 1F0 +10. 1I0 owes 15 and sends 6 for a buffer of 5. 0I0 nothing.
    # 1W0 -10 -15 and 7 gradients. 0W0 -10, 7 gradients, and its output stays with whoever received it: 5.
    after = [24, 29, 39, 55, 55, 37, 39]
    high = [24 + 110, 29 + 110, 39 + 40, 55, 55 + 80, 37 + 30]
    assert list(memory.held_bytes) == [after[0], *(held for pair in zip(high, after[1:]) for held in pair)]
    by_name = {time.name: (time.duration_ms, time.recompute_ms) for time in played.actions}
    assert (by_name["1I0"], by_name["0I0"], by_name["1W0"]) == ((1.0, 0.0), (0.0, 0.0), (3.0, 2.0))


def test_what_passes_through_a_stage_is_held_once() -> None:
    """Stage 1 of three ranks receives 5 and sends 5, of which 2 are the very bytes it received."""
    ends = []
    for passed in (0, 2):
        middle = msgspec.structs.replace(cost(1, receive_bytes=5, gradient_receive_bytes=5), passed_bytes=passed)
        costs = (cost(0, gradient_receive_bytes=5), middle, cost(2, receive_bytes=5))
        for kinds in ("B", "IW"):
            rows = tuple(tuple(f"{j}{kind}0" for kind in f"F{kinds}") for j in range(3))
            plan = PipelinePlan(stages=(("x",),) * 3, n_microbatches=1, checkpoint="never", actions=rows)
            ends.append(forecast(plan, costs).memory[1].held_bytes[-1])
    whole, split, whole_passed, split_passed = ends
    assert whole == split == 14 + 10 + 5 + 5  # parameters and gradients, buffers, output and gradient sent
    assert whole - whole_passed == 2  # the output; the gradient of what passes is a copy
    assert split - split_passed == 4  # the output, and I sends on the very gradient that came


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_ends_with_parameters_buffers_gradients_and_held_sends(schedule: str) -> None:
    n_stages = 2 if schedule in ("GPipe", "1F1B") else 4
    stages = tuple(
        cost(j, receive_bytes=5 if j else 0, gradient_receive_bytes=5 if j < n_stages - 1 else 0)
        for j in range(n_stages)
    )
    plan = PipelinePlan(stages=(("x",),) * n_stages, n_microbatches=4, schedule=schedule)
    for memory in forecast(plan, stages).memory:
        rest = memory.held_bytes[-1] - memory.parameter_bytes * 2 - memory.receive_bytes
        assert rest >= 0
        assert rest % 5 == 0  # whole boundary tensors, whose sends torch has not let go
        assert rest <= 5 * 4 * 4


def at(rank: int, kind: str, start: float, end: float) -> ActionTime:
    return ActionTime(rank=rank, stage=rank, kind=kind, microbatch=0, start_ms=start, end_ms=end)  # type: ignore[arg-type]


READ = (at(0, "F", 0, 10), at(1, "F", 40, 50), at(1, "B", 50, 70), at(0, "B", 100, 120))


def test_the_step_is_as_long_as_the_ranks_were_at_it() -> None:
    wall = schedule_of(ROWS, READ)
    assert wall.makespan_ms == 120
    assert [use.busy_ms for use in wall.ranks] == [30, 30]
    assert wall.bubble_fraction == 0.75
    assert wall.critical_path == ("0F0", "1F0", "1B0", "0B0")


def test_a_link_costs_what_a_free_rank_waited_for_a_neighbour_that_was_done() -> None:
    sent = transfers(schedule_of(ROWS, READ))
    assert [(one.source, one.target, one.start_ms, one.end_ms) for one in sent] == [(0, 1, 10, 40), (1, 0, 70, 100)]
    rows = link_table(schedule_of(ROWS, READ), ())
    assert [(row["from stage"], row["waits"], row["waited (ms)"]) for row in rows] == [(0, 1, 30), (1, 1, 30)]


def test_a_played_schedule_has_free_links() -> None:
    assert transfers(simulate(one_f_one_b(3, 5))) == ()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_looped_bfs_adds_up_in_another_order(schedule: str) -> None:
    rows = rows_of(PipelinePlan(stages=(("a",), ("b",), ("c",), ("d",)), n_microbatches=4, schedule=schedule))
    assert bool(out_of_order(format_rows(rows))) == (schedule == "LoopedBFS")
