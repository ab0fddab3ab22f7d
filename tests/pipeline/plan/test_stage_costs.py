"""Costs of blocks add up to stages, and a clock plays the schedule: times, idle ranks and memory by rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis.strategies import floats, integers, lists, sampled_from, tuples
from msgspec.structs import replace

from explorer.errors import BadInput, InvalidPlan
from explorer.pipeline.plan.actions import format_rows
from explorer.pipeline.plan.clock import UNIT_MS, forecast, out_of_order, schedule_of, simulate, transfers
from explorer.pipeline.plan.cuts import left_out
from explorer.pipeline.plan.schedules import SCHEDULES, gpipe, interleaved, one_f_one_b, rows_of
from explorer.pipeline.plan.stage_costs import predict, stage_costs, state_bytes
from explorer.pipeline.record.step import ActionCost, ActionTime, BlockCost, PipelineProfile, StageCost, StageOverhead
from explorer.pipeline.view.gantt import link_table
from explorer.record.graph import ModelRef
from explorer.record.policy import KEEP_ALL, Action, Policy, Unit
from explorer.record.run import CheckpointMode, Optimizer, PipelinePlan, RunSpec
from tests.pipeline.pipelines import HOST

KEPT = ActionCost(forward_ms=1.0, backward_ms=2.0, saved_bytes=100, forward_extra_bytes=120, backward_extra_bytes=40,
                  first_backward_extra_bytes=50)  # fmt: skip
AGAIN = ActionCost(forward_ms=1.0, backward_ms=3.0, recompute_ms=1.0, saved_bytes=10, forward_extra_bytes=120,
                   backward_extra_bytes=140, first_backward_extra_bytes=150)  # fmt: skip


def profile(n_blocks: int = 4, *, group: int = 1) -> PipelineProfile:
    names = [tuple(f"b{k * group + j}" for j in range(group)) for k in range(n_blocks // group)]
    blocks = tuple(replace(BLOCK, blocks=blocks, kept=KEPT, recomputed=AGAIN) for blocks in names)
    spec = RunSpec(model=ModelRef(target="m.py"))
    return PipelineProfile(spec=spec, environment=HOST, n_rows=2, batch_rows=8, blocks=blocks)


def plan(*stages: tuple[str, ...], n_microbatches: int = 4, schedule: str = "GPipe") -> PipelinePlan:
    return PipelinePlan(stages=stages, n_microbatches=n_microbatches, schedule=schedule)


def test_a_stage_costs_the_sum_of_its_blocks() -> None:
    first, last = stage_costs(profile(), plan(("b0", "b1"), ("b2", "b3")), KEEP_ALL)
    assert (first.kept.forward_ms, first.kept.backward_ms, first.kept.saved_bytes) == (2.0, 4.0, 200)
    assert first.kept.forward_extra_bytes == 220  # the second block starts with the first one's 100 held
    assert (first.receive_bytes, first.gradient_receive_bytes) == (0, 10)
    assert (last.receive_bytes, last.gradient_receive_bytes) == (10, 0)
    assert first.parameter_bytes == first.gradient_bytes == 16


def test_the_policy_chooses_block_by_block() -> None:
    first, _ = stage_costs(profile(), plan(("b0", "b1"), ("b2", "b3")), Policy.recompute(["b1"]))
    assert first.recomputed.saved_bytes == 110
    assert first.recomputed.recompute_ms == 1.0
    assert first.kept.saved_bytes == 200


def test_a_segment_keeps_its_input_only_and_runs_again_in_one_piece() -> None:
    (one,) = stage_costs(profile(2), plan(("b0", "b1")), Policy.recompute([("b0", "b1")]))
    assert one.recomputed.saved_bytes == 10  # the output of the last block alone
    assert one.recomputed.backward_ms == (1.0 + 2.0) + 3.0
    assert one.recomputed.recompute_ms == 1.0 + 1.0
    assert one.recomputed.backward_extra_bytes == 100 + 140
    assert one.recomputed.first_backward_extra_bytes == 100 + 150
    assert one.recomputed.forward_extra_bytes == 10 + 120  # the first block's 10 are held when the second one runs
    assert one.kept.saved_bytes == 200


def test_a_stage_pays_its_overhead_once() -> None:
    """It does not shrink with the microbatch: half the rows, half the blocks' time, all of the overhead."""
    paid = replace(profile(), overhead=StageOverhead(forward_ms=0.5, backward_ms=0.25))
    first, last = stage_costs(paid, plan(("b0",), ("b1", "b2", "b3"), n_microbatches=8), KEEP_ALL)
    assert (first.kept.forward_ms, first.kept.backward_ms) == (0.5 + 0.5, 1.0 + 0.25)
    assert (last.kept.forward_ms, last.kept.backward_ms) == (1.5 + 0.5, 3.0 + 0.25)


def test_what_goes_through_a_stage_goes_through_all_of_it() -> None:
    passing = tuple(replace(block, passed_bytes=4 - k) for k, block in enumerate(profile().blocks))
    first, last = stage_costs(replace(profile(), blocks=passing), plan(("b0", "b1"), ("b2", "b3")), KEEP_ALL)
    assert (first.passed_bytes, last.passed_bytes) == (3, 1)


SIZES = integers(0, 40).map(lambda n: 2 * n)


@given(lists(tuples(SIZES, SIZES, SIZES, SIZES, sampled_from([0, None, 8])), min_size=1, max_size=4), SIZES, SIZES)
def test_the_extra_of_a_stage_is_found_by_walking_through_its_blocks(
    sizes: list[tuple[int, int, int, int, int | None]], returned: int, loss: int
) -> None:
    """Each block saves, needs more inside, and makes 16 bytes of gradients, which do not shrink with the microbatch."""
    blocks = [
        replace(BLOCK, blocks=(f"b{k}",), gradient_bytes=16, passed_bytes=4, kept=ActionCost(
            forward_ms=1.0, backward_ms=2.0, saved_bytes=saved, forward_extra_bytes=forward, sent_gradient_bytes=sent,
            backward_extra_bytes=back, first_backward_extra_bytes=first))
        for k, (saved, forward, back, first, sent) in enumerate(sizes)
    ]  # fmt: skip
    blocks[-1] = replace(blocks[-1], returned_bytes=returned, loss_bytes=loss)
    whole = replace(profile(), blocks=tuple(blocks))
    (one,) = stage_costs(whole, plan(tuple(f"b{k}" for k in range(len(blocks))), n_microbatches=8), KEEP_ALL)
    held = high = 0  # of half the rows
    for saved, forward, *_ in sizes:
        high, held = max(high, held + forward // 2), held + saved // 2
    assert (one.kept.saved_bytes, one.kept.forward_extra_bytes, one.loss_bytes) == (held, high, loss // 2)
    now = made = high = first_high = 0
    output = (max(returned - 4, 0) + loss) // 2
    is_sent = False
    for saved, _, back, first, sent in reversed(sizes):
        before = now + output * is_sent
        high = max(high, before + back // 2)
        first_high = max(first_high, before + made + min(first, 16) + max(first - 16, 0) // 2)
        now, made, is_sent = now - saved // 2, made + 16, is_sent or sent != 0
    assert (one.kept.backward_extra_bytes, one.kept.first_backward_extra_bytes) == (high, first_high)
    first_sent = next((sent for *_, sent in sizes if sent), sizes[0][-1])
    assert one.kept.sent_gradient_bytes == (None if first_sent is None else first_sent // 2)


@pytest.mark.parametrize(("actions", "saved_bytes"), [
    ((), 100), (("recompute",), 10), (("recompute", "recompute"), 10), (("offload",), 55),
    (("recompute", "offload"), 55),
])  # fmt: skip
def test_blocks_that_stay_together_cost_what_their_actions_cost(actions: tuple[Action, ...], saved_bytes: int) -> None:
    whole = profile(2, group=2)
    chosen = replace(whole, blocks=tuple(replace(one, chosen=replace(KEPT, saved_bytes=55)) for one in whole.blocks))
    policy = Policy(units=tuple(Unit(blocks=(f"b{k}",), action=action) for k, action in enumerate(actions)))
    for priced, expected in ((chosen, saved_bytes), (whole, saved_bytes if saved_bytes == 100 else 10)):
        (one,) = stage_costs(priced, plan(("b0", "b1")), policy)
        assert (one.kept.saved_bytes, one.recomputed.saved_bytes) == (100, expected)


def test_blocks_that_stay_together_are_not_cut() -> None:
    with pytest.raises(InvalidPlan, match="b0, b1 stay together"):
        stage_costs(profile(2, group=2), plan(("b0",), ("b1",)), KEEP_ALL)


def test_an_empty_stage_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="hold no block"):
        stage_costs(profile(2), plan(("b0", "b1"), ("zz",)), KEEP_ALL)


def test_a_prediction_has_every_rank_and_says_where_it_comes_from() -> None:
    wide = plan(*((f"b{k}",) for k in range(4)), n_microbatches=4, schedule="Interleaved1F1B")
    played = predict(profile(), wide, Policy.recompute(["b3"]))
    assert played.origin == "predicted"
    assert [memory.rank for memory in played.memory] == [0, 1]
    assert all(memory.origin == "predicted" and memory.peak_action for memory in played.memory)


def test_what_is_recomputed_inside_a_block_is_said_to_be_left_out() -> None:
    two = plan(("b0", "b1"), ("b2", "b3"))
    assert left_out(two, Policy.recompute(["b0", ("b2", "b3")])) == ""
    assert "(b1.mlp)" in left_out(two, Policy.recompute(["b0", "b1.mlp"]))
    many = left_out(two, Policy.recompute([f"b{k}.mlp" for k in range(4)]))
    assert "b2.mlp and 1 more)" in many and "b3.mlp" not in many


BLOCK = BlockCost(
    blocks=("b",),
    kept=ActionCost(forward_ms=1.0, backward_ms=2.0, saved_bytes=100),
    recomputed=ActionCost(forward_ms=1.0, backward_ms=3.0, recompute_ms=1.0, saved_bytes=10),
    parameter_bytes=8,
    gradient_bytes=8,
    output_bytes=10,
)


ROWS = one_f_one_b(2, 1)


def cost(stage: int, **fields: int) -> StageCost:
    kept = ActionCost(forward_ms=1.0, backward_ms=2.0, saved_bytes=100, forward_extra_bytes=110,
                      backward_extra_bytes=20, first_backward_extra_bytes=30)  # fmt: skip
    again = ActionCost(forward_ms=1.0, backward_ms=3.0, recompute_ms=1.0, saved_bytes=10, forward_extra_bytes=110,
                       backward_extra_bytes=115, first_backward_extra_bytes=125)  # fmt: skip
    return StageCost(stage=stage, kept=kept, recomputed=again, parameter_bytes=7, gradient_bytes=7, **fields)


@given(n_ranks=integers(1, 6), extra=integers(0, 6))
def test_bubbles_of_gpipe_and_one_f_one_b_are_the_closed_form(n_ranks: int, extra: int) -> None:
    n_microbatches = n_ranks + extra
    for rows in (gpipe(n_ranks, n_microbatches), one_f_one_b(n_ranks, n_microbatches)):
        assert simulate(rows).bubble_fraction == pytest.approx((n_ranks - 1) / (n_microbatches + n_ranks - 1))


@pytest.mark.parametrize(("schedule", "bubble", "in_flight"), [
    ("GPipe", 3 / 11, [8, 8, 8, 8]),
    ("1F1B", 3 / 11, [4, 3, 2, 1]),
    ("Interleaved1F1B", 3 / 19, [11, 9, 7, 5]),
    ("LoopedBFS", 3 / 19, [16, 16, 16, 16]),
    ("InterleavedZeroBubble", 1 / 17, [8, 8, 8, 8]),
    ("ZBVZeroBubble", 1 / 17, [8, 8, 8, 8]),
    ("DualPipeV", 1 / 17, [9, 9, 9, 9]),
])  # fmt: skip
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


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if SCHEDULES[name].splits_backward])
def test_a_split_backward_is_not_predicted(schedule: str) -> None:
    four = plan(*((f"b{k}",) for k in range(4)), schedule=schedule)
    with pytest.raises(InvalidPlan, match=f"{schedule} splits the backward .* not predicted"):
        predict(profile(), four, KEEP_ALL)


def test_memory_of_one_stage_by_hand() -> None:
    plan = PipelinePlan(stages=(("x",),), n_microbatches=2, schedule="GPipe", checkpoint="never")
    (memory,) = forecast(plan, (cost(0),)).memory
    # 7 parameters; F0 +100, F1 +100; B0 from 207 up by 30; then 7 gradients more and 100 less.
    assert list(memory.held_bytes) == [7, 117, 107, 217, 207, 237, 114, 134, 14]
    assert (memory.peak_bytes, memory.peak_action) == (237, "0B0")


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@given(n_ranks=integers(1, 4), n_microbatches=integers(1, 7))
def test_memory_of_every_action_counted_by_the_rules(
    schedule: str, checkpoint: CheckpointMode, n_ranks: int, n_microbatches: int
) -> None:
    """GPipe keeps all it sent to the end. 1F1B keeps its last gradient, and from its backward on the output of the
    last warm-up send but one, until the drain begins. A stage passes 2 of its 5 bytes on; a loss takes 3."""
    m = n_microbatches = max(n_microbatches, n_ranks)
    plan = PipelinePlan(stages=(("x",),) * n_ranks, n_microbatches=m, schedule=schedule, checkpoint=checkpoint)
    costs = []
    for stage in range(n_ranks):
        received, returned = 5 * (stage > 0), 5 * (stage < n_ranks - 1)
        costs.append(cost(stage, receive_bytes=received, gradient_receive_bytes=returned, passed_bytes=2, loss_bytes=3))
    again = {"never": 0, "always": m, "except_last": m - 1}[checkpoint]
    for stage, (row, memory) in enumerate(zip(rows_of(plan), forecast(plan, tuple(costs)).memory)):
        n_warm_up, is_first, is_last = min(m, n_ranks - stage), stage == 0, stage == n_ranks - 1
        now = fixed = 7 + m * 5 * ((not is_first) + (not is_last))
        flying, n_back, expected = 0, 0, [fixed]
        for action in row:
            saved, extra = (10, 115) if action.microbatch < again else (100, 20)
            if action.kind == "F":
                flying += saved
                high = now + 110
            else:
                flying -= saved
                high = now + extra + 10 * (n_back == 0)
                n_back += 1
            sent_gradients = (n_back if schedule == "GPipe" else min(n_back, 1)) * 5 * (not is_first)
            is_between = 0 <= n_warm_up - 2 < n_back <= m - n_warm_up
            sent_outputs = (n_back if schedule == "GPipe" else is_between) * 3 * (not is_last)
            now = fixed + flying + 7 * (n_back > 0) + sent_gradients + sent_outputs + 3 * n_back
            expected += [high, now]
        assert list(memory.held_bytes) == expected, (stage, row)


@pytest.mark.parametrize(("optimizer", "momentum", "n_copies"), [
    ("adamw", 0.0, 2), ("sgd", 0.9, 1), ("sgd", 0.0, 0), ("none", 0.9, 0),
])  # fmt: skip
def test_an_optimizer_keeps_a_copy_of_the_trained_parameters_for_each_moment(
    optimizer: Optimizer, momentum: float, n_copies: int
) -> None:
    spec = RunSpec(model=ModelRef(target="m.py"), optimizer=optimizer, momentum=momentum)
    assert state_bytes(spec, 24) == n_copies * 24
    (memory,) = predict(replace(profile(3), spec=spec), plan(("b0", "b1", "b2")), KEEP_ALL).memory
    assert memory.optimizer_bytes == n_copies * 24
    with pytest.raises(BadInput, match="8 bits"):
        state_bytes(replace(spec, optimizer="adamw8bit"), 24)


def test_memory_of_two_stages_of_one_rank_by_hand() -> None:
    """What the second stage sends stays in the rank, and takes the place of a buffer."""
    first, second = cost(0, gradient_receive_bytes=5), cost(1, receive_bytes=5)
    costs = (first, replace(second, recomputed=replace(second.recomputed, sent_gradient_bytes=6)))
    rows = (("0F0", "1F0", "1B0", "0B0"),)
    two = PipelinePlan(stages=(("x",), ("y",)), n_microbatches=1, schedule="Interleaved1F1B", actions=rows)
    (memory,) = forecast(two, costs).memory
    # 14 parameters, 10 buffers. 0F0 +10 -5, 1F0 +10. 1B0 -10, 7 gradients, sends 6 for a buffer of 5.
    # 0B0 -10, 7 gradients, and its output stays with whoever received it: 5.
    after = [24, 29, 39, 37, 39]
    high = [24 + 110, 29 + 110, 39 + 125, 37 + 125]
    assert list(memory.held_bytes) == [after[0], *(held for pair in zip(high, after[1:]) for held in pair)]


def test_what_passes_through_a_stage_is_held_once() -> None:
    """Stage 1 of three ranks receives 5 and sends 5, of which 2 are the very bytes it received."""
    ends = []
    for passed in (0, 2):
        middle = replace(cost(1, receive_bytes=5, gradient_receive_bytes=5), passed_bytes=passed)
        costs = (cost(0, gradient_receive_bytes=5), middle, cost(2, receive_bytes=5))
        rows = tuple((f"{j}F0", f"{j}B0") for j in range(3))
        three = PipelinePlan(stages=(("x",),) * 3, n_microbatches=1, checkpoint="never", actions=rows)
        ends.append(forecast(three, costs).memory[1].held_bytes[-1])
    whole, passed_on = ends
    assert whole == 14 + 10 + 5 + 5  # parameters and gradients, buffers, output and gradient sent
    assert whole - passed_on == 2  # the output; the gradient of what passes is a copy


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if not SCHEDULES[name].splits_backward])
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
