"""Costs of stages from costs of blocks: sums, peaks and scale by hand."""

from __future__ import annotations

import msgspec
import pytest

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.stage_costs import left_out, predict, stage_costs
from explorer.record.graph import ModelRef
from explorer.record.measurement import Environment
from explorer.record.pipeline_cost import ActionCost, BlockCost, PipelineProfile, SplitCost, StageOverhead
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


def test_smaller_microbatches_cost_less() -> None:
    (one,) = stage_costs(profile(1), plan(("b0",), n_microbatches=8), KEEP_ALL)
    assert (one.kept.forward_ms, one.kept.saved_bytes) == (0.5, 50)


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
