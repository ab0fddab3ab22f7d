"""The action list in one process and rank by rank: the same gradients as the unsplit model, bit by bit."""

from __future__ import annotations

import msgspec
import pytest

from explorer.engine.pipeline.run import run_pipeline
from explorer.errors import InvalidPlan
from explorer.plan.pipeline.actions import format_rows
from explorer.plan.pipeline.orders import one_f_one_b
from explorer.plan.pipeline.schedules import SCHEDULES
from explorer.record.policy import KEEP_ALL, Policy
from tests.engine.pipeline.pipeline_nets import EXPERTS, LANGUAGE, TRANSPOSED, UNET, WITHOUT_A_LOSS
from tests.engine.pipeline.plans import spec
from tests.engine.pipeline.play_checks import SOME, assert_split_is_exact

N_STAGES = {name: 3 if name in ("GPipe", "1F1B") else 4 for name in SCHEDULES}


@pytest.mark.parametrize("policy", [KEEP_ALL, SOME], ids=["kept", "recomputed"])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "LoopedBFS"])
def test_splitting_moves_no_bit(schedule: str, policy: Policy) -> None:
    assert_split_is_exact(run_pipeline(spec("language", LANGUAGE, N_STAGES[schedule], policy, schedule=schedule)))


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


def test_carried_skips_batch_norm_and_work_in_place() -> None:
    run = run_pipeline(spec("unet", UNET, 3, Policy.recompute(["up"]), schedule="1F1B"))
    assert_split_is_exact(run)
    assert len(run.stages[1].receives) == 2  # the skip is carried beside the pooled tensor
    counted = next(s for s in run.buffers if s.name.endswith("num_batches_tracked"))
    assert counted.microbatching.max_abs == 3.0  # four microbatches against one batch


def test_non_contiguous_boundaries_and_integer_values() -> None:
    run = run_pipeline(spec("transposed", TRANSPOSED, 3, n_microbatches=2))
    assert_split_is_exact(run)
    assert any("int64" in name for name in run.stages[1].receives)
    assert {s.microbatching.verdict for s in run.gradients} == {"rounding"}  # no dropout: the same sums, in other order


def test_a_value_that_leaves_by_an_attribute_is_followed() -> None:
    assert_split_is_exact(run_pipeline(spec("experts", EXPERTS, 3, n_microbatches=2)))


def test_an_own_action_list_runs() -> None:
    rows = format_rows(one_f_one_b(3, 4))
    own = (rows[0], rows[1], tuple(name for i in range(4) for name in (f"2F{i}", f"2B{i}")))
    run = run_pipeline(spec("language", LANGUAGE, 3, schedule="1F1B", actions=own))
    assert_split_is_exact(run)
    assert run.rows == own


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
