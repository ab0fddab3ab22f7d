"""Costs of stages from costs of blocks: sums, peaks, scale and split backward, by hand."""

from __future__ import annotations

import msgspec
import pytest

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.clock import halves
from explorer.plan.pipeline.stage_costs import (
    all_in_weight,
    as_one_checkpoint,
    in_a_row,
    left_out,
    predict,
    stage_costs,
)
from explorer.record.graph import ModelRef
from explorer.record.measurement import Environment
from explorer.record.pipeline_cost import ActionCost, BlockCost, LastBlock, PipelineProfile, SplitCost, StageOverhead
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import PipelinePlan, RunSpec

KEPT = ActionCost(forward_ms=1.0, backward_ms=2.0, saved_bytes=100, forward_extra_bytes=120, backward_extra_bytes=40,
                  first_backward_extra_bytes=50)  # fmt: skip
AGAIN = ActionCost(forward_ms=1.0, backward_ms=3.0, recompute_ms=1.0, saved_bytes=10, forward_extra_bytes=120,
                   backward_extra_bytes=140, first_backward_extra_bytes=150)  # fmt: skip


def profile(n_blocks: int = 4, *, group: int = 1) -> PipelineProfile:
    names = [tuple(f"b{k * group + j}" for j in range(group)) for k in range(n_blocks // group)]
    blocks = tuple(
        BlockCost(blocks=blocks, kept=KEPT, recomputed=AGAIN, parameter_bytes=8, gradient_bytes=8, output_bytes=10)
        for blocks in names
    )
    environment = Environment(
        device="cpu", device_name="", torch_version="", python_version="", platform="", n_threads=1
    )
    return PipelineProfile(
        spec=RunSpec(model=ModelRef(target="m.py")), environment=environment, n_rows=2, batch_rows=8, blocks=blocks
    )


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
    assert one.kept.saved_bytes == 200


def test_a_stage_pays_its_overhead_once() -> None:
    """It does not shrink with the microbatch: half the rows, half the blocks' time, all of the overhead."""
    paid = msgspec.structs.replace(profile(), overhead=StageOverhead(forward_ms=0.5, backward_ms=0.25, input_ms=0.125))
    first, last = stage_costs(paid, plan(("b0",), ("b1", "b2", "b3"), n_microbatches=8), KEEP_ALL)
    assert (first.kept.forward_ms, first.kept.backward_ms) == (0.5 + 0.5, 1.0 + 0.25)
    assert (last.kept.forward_ms, last.kept.backward_ms) == (1.5 + 0.5, 3.0 + 0.25)
    assert last.kept.split is None


def test_the_first_stage_does_its_whole_backward_in_w() -> None:
    first, last = stage_costs(split_profile(), plan(("b0", "b1"), ("b2", "b3")), Policy.recompute(["b1"]))
    split = first.recomputed.split
    assert split is not None
    assert (split.input_ms, split.weight_ms, split.weight_recompute_ms) == (0.0, 5.0, 1.0)
    assert split.weight_extra_bytes == first.recomputed.backward_extra_bytes
    assert last.kept.split is not None
    assert last.kept.split.input_ms == 2 * 1.5


def split_profile() -> PipelineProfile:
    half = SplitCost(input_ms=1.5, weight_ms=1.0)
    blocks = [
        msgspec.structs.replace(block, kept=msgspec.structs.replace(block.kept, split=half))
        for block in profile().blocks
    ]
    return msgspec.structs.replace(profile(), blocks=tuple(blocks))


def test_what_goes_through_a_stage_goes_through_all_of_it() -> None:
    passing = [msgspec.structs.replace(block, passed_bytes=4 - k) for k, block in enumerate(profile().blocks)]
    first, last = stage_costs(
        msgspec.structs.replace(profile(), blocks=tuple(passing)), plan(("b0", "b1"), ("b2", "b3")), KEEP_ALL
    )
    assert (first.passed_bytes, last.passed_bytes) == (3, 1)


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


SPLIT_KEPT = SplitCost(input_ms=1.0, weight_ms=1.0, input_extra_bytes=30, owed_bytes=20, weight_extra_bytes=10,
                 first_weight_extra_bytes=18, weight_end_bytes=-40)  # fmt: skip
SPLIT_AGAIN = SplitCost(input_ms=2.0, weight_ms=4.0, input_recompute_ms=1.0, weight_recompute_ms=3.0,
                        weight_ms_per_block=0.5, input_extra_bytes=130, owed_bytes=50, weight_extra_bytes=300,
                        first_weight_extra_bytes=308, weight_end_bytes=200)  # fmt: skip
BLOCK = BlockCost(
    blocks=("b",),
    kept=ActionCost(forward_ms=1.0, backward_ms=2.0, saved_bytes=100, split=SPLIT_KEPT),
    recomputed=ActionCost(forward_ms=1.0, backward_ms=3.0, recompute_ms=1.0, saved_bytes=10, split=SPLIT_AGAIN),
    parameter_bytes=8,
    gradient_bytes=8,
    output_bytes=10,
)


def test_recomputed_blocks_pile_up_until_the_last_one_is_done() -> None:
    cost = in_a_row([BLOCK] * 3, [BLOCK.recomputed] * 3, 1.0)
    assert cost is not None
    assert cost.input_extra_bytes == 50 + 50 + 130
    assert cost.owed_bytes == 150
    assert cost.weight_extra_bytes == 200 + 200 + 300
    assert cost.first_weight_extra_bytes == 2 * (200 + 8) + 308
    assert cost.weight_ms == 3 * 4.0 + 0.5 * (0 + 1 + 2)
    assert (cost.input_recompute_ms, cost.weight_recompute_ms) == (3.0, 9.0)


def test_kept_blocks_free_as_they_go() -> None:
    cost = in_a_row([BLOCK] * 2, [BLOCK.kept] * 2, 1.0)
    assert cost is not None
    assert (cost.weight_extra_bytes, cost.weight_end_bytes) == (10, -80)


def test_the_last_block_lets_go_of_its_graph_when_i_ends() -> None:
    last = LastBlock(
        input_extra_bytes=25, held_bytes=15, owed_bytes=5, weight_extra_bytes=9, first_weight_extra_bytes=12
    )
    kept = msgspec.structs.replace(BLOCK.kept, split=msgspec.structs.replace(SPLIT_KEPT, last=last))
    cost = in_a_row([BLOCK] * 2, [kept] * 2, 1.0)
    assert cost is not None
    assert cost.owed_bytes == 20 + 5
    assert cost.input_extra_bytes == 15 + 30  # while I is in the first block, the last one still holds its graph
    assert (cost.weight_extra_bytes, cost.first_weight_extra_bytes) == (10, 18)
    alone = in_a_row([BLOCK], [kept], 1.0)
    assert alone is not None
    assert (alone.input_extra_bytes, alone.owed_bytes, alone.weight_extra_bytes) == (25, 5, 9)


def test_a_microbatch_of_half_the_rows_makes_gradients_of_the_same_size() -> None:
    cost = in_a_row([BLOCK], [BLOCK.recomputed], 0.5)
    assert cost is not None
    assert cost.first_weight_extra_bytes == 8 + 150
    assert (cost.weight_extra_bytes, cost.owed_bytes, cost.input_ms) == (150, 25, 1.0)


def test_one_block_without_a_measurement_leaves_the_stage_without() -> None:
    bare = msgspec.structs.replace(BLOCK.kept, split=None)
    assert in_a_row([BLOCK, BLOCK], [BLOCK.kept, bare], 1.0) is None
    unknown = msgspec.structs.replace(BLOCK, recomputed=bare)
    assert as_one_checkpoint([BLOCK, unknown]) is None


def test_in_one_checkpoint_every_group_runs_all_blocks_again() -> None:
    cost = as_one_checkpoint([BLOCK, BLOCK])
    assert cost is not None
    assert cost.input_recompute_ms == 2.0
    assert cost.weight_recompute_ms == (3 + 3) * 2.0
    assert cost.weight_ms == 1.0 + 1.0 + 12.0
    assert cost.weight_end_bytes == 2 * (200 + 3 * 100)  # each of three groups leaves the other block's bytes as well


def test_the_guess_and_the_first_stage() -> None:
    guess, first = halves(BLOCK.recomputed), all_in_weight(BLOCK.recomputed)
    assert (guess.input_ms, guess.weight_ms) == (2.0, 2.0)
    assert (first.input_ms, first.weight_ms, first.owed_bytes) == (0.0, 3.0, 0)
