"""The action list in one process and rank by rank: the same gradients as the unsplit model, bit by bit."""

from __future__ import annotations

import msgspec
import pytest

from explorer.engine.model.describe import describe
from explorer.engine.pipeline.run import run_pipeline
from explorer.errors import InvalidPlan
from explorer.plan.hazards.known import hazards
from explorer.plan.pipeline.actions import format_rows
from explorer.plan.pipeline.orders import one_f_one_b
from explorer.plan.pipeline.schedules import SCHEDULES
from explorer.record.pipeline_run import PipelineRun
from explorer.record.policy import KEEP_ALL, Policy
from tests.engine.pipeline.pipeline_nets import CARRYING, EXPERTS, LANGUAGE, TRANSPOSED, UNET, WITHOUT_A_LOSS
from tests.engine.pipeline.plans import spec

SOME = Policy.recompute(LANGUAGE[1:4])
N_STAGES = {name: 3 if name in ("GPipe", "1F1B") else 4 for name in SCHEDULES}


def assert_split_is_exact(run: PipelineRun) -> None:
    assert run.failure is None, run.failure
    assert run.gradients
    wrong = {s.name: s.splitting.max_abs for s in run.gradients if not s.splitting.bitwise}
    assert not wrong, f"{len(wrong)} of {len(run.gradients)} gradients moved: {wrong}"
    moved = [s.name for s in run.buffers if not s.splitting.bitwise]
    assert not moved, moved


@pytest.mark.parametrize("policy", [KEEP_ALL, SOME], ids=["kept", "recomputed"])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "LoopedBFS"])
def test_splitting_moves_no_bit(schedule: str, policy: Policy) -> None:
    assert_split_is_exact(run_pipeline(spec("language", LANGUAGE, N_STAGES[schedule], policy, schedule=schedule)))


def test_behind_a_frozen_stage_a_split_backward_loses_what_the_hazard_says() -> None:
    plan = spec("language", LANGUAGE, 4, schedule="ZBVZeroBubble")
    assert plan.plan is not None
    graph = describe(plan.model)
    still = msgspec.structs.replace(plan, frozen=plan.plan.stages[0])  # the positions train before the first cut
    assert "lost-gradients" not in {one.rule for one in hazards(graph, plan.policy, plan.plan, still)}
    assert not run_pipeline(still).moved
    frozen = msgspec.structs.replace(plan, frozen=(*plan.plan.stages[0], "positions"))
    fired = {one.rule: one for one in hazards(graph, plan.policy, plan.plan, frozen)}
    assert fired["lost-gradients"].severity == "error"
    run = run_pipeline(frozen)
    assert run.failure is None
    lost = {shares.name for shares in run.gradients if shares.splitting.presence == "baseline only"}
    assert lost, "torch finds the way to the weights from the stage's input, which needs no gradient"
    assert {shares.name for shares in run.moved} == lost
    assert {name.rpartition(".")[0] for name in lost} <= set(fired["lost-gradients"].blocks)
    whole = run_pipeline(
        msgspec.structs.replace(frozen, plan=msgspec.structs.replace(plan.plan, schedule="Interleaved1F1B"))
    )
    assert not whole.moved


def test_breadth_first_adds_up_in_another_order_and_says_so() -> None:
    run = run_pipeline(spec("language", LANGUAGE, 4, schedule="LoopedBFS"))
    assert run.n_splitting_equal < len(run.gradients)
    assert {s.splitting.verdict for s in run.gradients} <= {"bitwise equal", "rounding"}
    assert not run.moved
    assert any("another order of microbatches" in note for note in run.notes)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_each_rank_alone_gives_the_same_gradients(schedule: str) -> None:
    run = run_pipeline(spec("language", LANGUAGE, N_STAGES[schedule], SOME, schedule=schedule), "replay")
    assert_split_is_exact(run)
    assert {time.rank for time in run.actions} == {memory.rank for memory in run.memory}


def test_replay_and_one_process_measure_the_same_memory() -> None:
    plan = spec("language", LANGUAGE, 3, SOME, schedule="1F1B", arguments={"width": 64, "length": 32})
    together, alone = run_pipeline(plan), run_pipeline(plan, "replay")
    assert [m.peak_bytes for m in together.memory] == [m.peak_bytes for m in alone.memory]
    assert [m.peak_action for m in together.memory] == [m.peak_action for m in alone.memory]


def test_carried_skips_batch_norm_and_work_in_place() -> None:
    run = run_pipeline(spec("unet", UNET, 3, Policy.recompute(["up"]), schedule="1F1B"))
    assert_split_is_exact(run)
    assert len(run.stages[1].receives) == 2  # the skip is carried beside the pooled tensor
    counted = next(s for s in run.buffers if s.name.endswith("num_batches_tracked"))
    assert counted.microbatching.max_abs == 3.0  # four microbatches against one batch


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV", "1F1B"])
def test_what_blocks_hand_on_can_be_read_again_after_a_split_backward(schedule: str) -> None:
    """torch's I detaches in place what a stage sends; a checkpoint of the stage reads it once more in W."""
    run = run_pipeline(spec("carrying", CARRYING, 4, Policy.recompute(CARRYING), schedule=schedule))
    assert_split_is_exact(run)


def test_non_contiguous_boundaries_and_integer_values() -> None:
    run = run_pipeline(spec("transposed", TRANSPOSED, 3, n_microbatches=2))
    assert_split_is_exact(run)
    assert any("int64" in name for name in run.stages[1].receives)
    assert {s.microbatching.verdict for s in run.gradients} == {"rounding"}  # no dropout: the same sums, in other order


def test_a_value_that_leaves_by_an_attribute_is_followed() -> None:
    assert_split_is_exact(run_pipeline(spec("experts", EXPERTS, 3, n_microbatches=2)))


def test_tied_weights_are_summed_and_named() -> None:
    run = run_pipeline(spec("language", LANGUAGE, 3, arguments={"tied": True}))
    tied = next(s for s in run.gradients if len(s.stages) > 1)
    assert (tied.name, tied.stages) == ("tokens.weight", (0, 2))
    assert tied.splitting.relative_norm is not None
    assert tied.splitting.relative_norm < 1e-6
    assert (tied.splitting.bitwise, tied.splitting.verdict) == (False, "rounding")
    assert all(s.splitting.bitwise for s in run.gradients if s is not tied)
    assert any("tokens.weight" in note for note in run.notes)


def test_a_partial_tied_gradient_would_be_seen() -> None:
    """The test above has teeth: one stage's share alone is far off."""
    from explorer.engine.pipeline.cut.build import build
    from explorer.engine.pipeline.play.inproc import run_pass

    pipeline = build(spec("language", LANGUAGE, 3, arguments={"tied": True}))
    run_pass(pipeline)
    (_, first), (_, last) = pipeline.owners["tokens.weight"]
    assert first.data_ptr() == last.data_ptr()
    assert first.grad is not None
    assert last.grad is not None
    whole = pipeline.gradients()["tokens.weight"]
    assert whole is not None
    for part in (first.grad, last.grad):
        assert (part / 4 - whole).norm() > 0.01 * whole.norm()


def test_dropout_without_keys_depends_on_the_split() -> None:
    run = run_pipeline(spec("language", LANGUAGE, 3, keyed_rng=False))
    assert run.n_splitting_equal < len(run.gradients)
    assert max(s.splitting.relative_norm or 0.0 for s in run.gradients) > 1e-3
    assert any("not keyed" in note for note in run.notes)


def test_shares_tell_recompute_from_splitting() -> None:
    """A policy that does not restore the generator is wrong by itself; splitting adds nothing to it."""
    careless = Policy.recompute(LANGUAGE[1:4], preserve_rng_state=False)
    run = run_pipeline(spec("language", LANGUAGE, 3, careless))
    assert "different" in {s.recompute.verdict for s in run.gradients}
    kept = run_pipeline(spec("language", LANGUAGE, 3, SOME))
    assert all(shares.recompute.bitwise and shares.splitting.bitwise for shares in kept.gradients)


@pytest.mark.parametrize(("mode", "again"), [("always", 4), ("except_last", 3), ("never", 0)])
def test_which_microbatches_are_checkpointed(mode: str, again: int) -> None:
    run = run_pipeline(spec("language", LANGUAGE, 3, SOME, checkpoint=mode, schedule="1F1B"))
    assert_split_is_exact(run)
    calls = {block.fqn: (block.n_forward, block.n_recompute) for block in run.blocks}
    assert calls["blocks.1"] == (4, again)
    assert calls["head"] == (4, 0)


def test_eval_mode_recomputes_all_the_same() -> None:
    run = run_pipeline(msgspec.structs.replace(spec("language", LANGUAGE, 3, SOME), mode="eval"))
    assert_split_is_exact(run)
    assert {block.n_recompute for block in run.blocks if block.fqn in SOME.blocks} == {4}


def test_a_split_backward_multiplies_recompute_and_warns() -> None:
    run = run_pipeline(spec("language", LANGUAGE, 4, SOME, schedule="ZBVZeroBubble"))
    multipliers = {block.fqn: block.multiplier for block in run.blocks}
    assert multipliers["tokens"] == 1.0
    assert multipliers["blocks.2"] > 2.0
    assert any("splits the backward" in note for note in run.notes)


def test_deferred_batch_norm_moves_once_and_lands_near_the_whole_batch() -> None:
    run = run_pipeline(spec("unet", UNET, 3, deferred_batch_norm=True))
    assert_split_is_exact(run)
    for shares in run.buffers:
        if shares.name.startswith("down"):
            assert (shares.microbatching.relative_norm or 0.0) < 1e-5, shares.name
            if shares.name.endswith("num_batches_tracked"):
                assert shares.microbatching.bitwise


def test_an_own_action_list_runs() -> None:
    rows = format_rows(one_f_one_b(3, 4))
    own = (rows[0], rows[1], tuple(name for i in range(4) for name in (f"2F{i}", f"2B{i}")))
    run = run_pipeline(spec("language", LANGUAGE, 3, schedule="1F1B", actions=own))
    assert_split_is_exact(run)
    assert run.rows == own


def test_memory_is_complete() -> None:
    run = run_pipeline(spec("language", LANGUAGE, 3, schedule="GPipe", arguments={"width": 64, "length": 32}))
    for memory in run.memory:
        assert memory.origin == "measured"
        assert memory.peak_bytes is not None
        assert memory.peak_bytes > memory.parameter_bytes + memory.receive_bytes
        assert memory.peak_action == f"{memory.rank}B0"
        assert list(memory.time_ns) == sorted(memory.time_ns)
        # Parameters, gradients and receive buffers are what is left, and sends that torch still holds.
        assert memory.held_bytes[-1] >= 2 * memory.parameter_bytes + memory.receive_bytes
    whole = 4 * 64 * 32 * 8
    assert [memory.receive_bytes for memory in run.memory] == [whole, 2 * whole, whole]


def test_composed_times_are_the_measured_ones() -> None:
    run = run_pipeline(msgspec.structs.replace(spec("language", LANGUAGE, 3, SOME, schedule="1F1B"), n_repeats=1))
    assert run.composed is not None
    assert run.composed.origin == "measured"
    measured = {time.name: time.duration_ms for time in run.actions}
    assert {t.name: pytest.approx(t.duration_ms) for t in run.composed.actions} == measured  # one timed pass
    assert any(time.recompute_ms > 0 for time in run.actions if time.kind == "B")
    assert run.composed.makespan_ms < sum(measured.values())


def test_an_indivisible_batch_is_explained() -> None:
    with pytest.raises(InvalidPlan, match="8 rows does not divide into 3") as caught:
        run_pipeline(spec("language", LANGUAGE, 2, n_microbatches=3))
    assert "1, 2, 4, 8" in caught.value.hint


def test_a_model_that_raises_is_a_result() -> None:
    run = run_pipeline(spec("without_a_loss", WITHOUT_A_LOSS, 2))
    assert run.failure is not None
    assert run.failure.sentence.startswith("Rank 1 failed in 1F0: The model raised ValueError: no loss today")
    assert run.failed_rank == 1
    assert run.stages  # what is known without running stays


def test_the_world_is_left_as_found() -> None:
    import torch

    from explorer.engine.model.load import load

    plan = spec("unet", UNET, 2, Policy.recompute(["up"]))
    loaded = load(plan.model)
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    rng, threads = torch.get_rng_state(), torch.get_num_threads()
    run_pipeline(plan, loaded=loaded)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.model.modules())
