"""Schedules in one process: no bit moves; actions, calls and bytes are those of the ranks and of torch's lists."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
from torch import nn

from explorer.engine.device.device import CpuDevice, WallClock
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.engine.policy.apply import apply_policy
from explorer.errors import InvalidPlan, NotOnThisDevice
from explorer.pipeline.engine import torch_adapter
from explorer.pipeline.engine.build import build
from explorer.pipeline.engine.in_process import SendHandles, run_pass
from explorer.pipeline.engine.microbatches import KeyedRng, deferred_batch_norm
from explorer.pipeline.engine.pass_readings import MemoryWatch, PassReadings
from explorer.pipeline.engine.run import run_pipeline
from explorer.pipeline.plan.actions import Action, format_rows, to_csv
from explorer.pipeline.plan.schedules import SCHEDULES, rows_of
from explorer.pipeline.record.step import ActionTime
from explorer.plan.hazards.hazards import hazards
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan
from tests.pipeline.engine.pipeline_nets import CARRYING, EXPERTS, LANGUAGE, TRANSPOSED, UNET, WITHOUT_A_LOSS
from tests.pipeline.engine.pipeline_runs import SOME, assert_split_is_exact, ran, spec

N_STAGES = {name: 3 if name in ("GPipe", "1F1B") else 4 for name in SCHEDULES}


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "LoopedBFS"])
def test_splitting_moves_no_bit(schedule: str) -> None:
    assert_split_is_exact(ran(spec("language", LANGUAGE, N_STAGES[schedule], SOME, schedule=schedule)))


def test_breadth_first_adds_up_in_another_order_and_says_so() -> None:
    run = ran(spec("language", LANGUAGE, 4, schedule="LoopedBFS"))
    assert run.n_splitting_equal < len(run.gradients)
    assert {s.splitting.verdict for s in run.gradients} <= {"bitwise equal", "rounding"}
    assert not run.moved
    assert any("another order of microbatches" in note for note in run.notes)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_each_rank_alone_has_the_bytes_and_losses_that_it_has_beside_the_others(schedule: str) -> None:
    """Fed with recorded boundary tensors, as stages are priced."""
    pipeline = build(spec("language", LANGUAGE, N_STAGES[schedule], SOME, schedule=schedule))
    together = run_pass(pipeline, keep_mail=True)
    gradients = pipeline.gradients()
    memory = run_pass(pipeline, memory=True).memory()
    losses: dict[int, float] = {}
    for rank, beside in enumerate(memory):
        losses |= run_pass(pipeline, alone=([rank], together.mail)).losses
        (alone,) = run_pass(pipeline, alone=([rank], together.mail), memory=True).memory()
        assert (alone.rank, alone.peak_bytes, alone.peak_action) == (rank, beside.peak_bytes, beside.peak_action)
    assert losses == together.losses and len(losses) == 4
    assert all(torch.equal(gradient, gradients[name]) for name, gradient in pipeline.gradients().items())


def test_carried_skips_batch_norm_and_work_in_place() -> None:
    run = ran(spec("unet", UNET, 3, Policy.recompute(["up"]), schedule="1F1B"))
    assert_split_is_exact(run)
    assert len(run.stages[1].receives) == 2  # the skip is carried beside the pooled tensor
    counted = next(s for s in run.buffers if s.name.endswith("num_batches_tracked"))
    assert counted.microbatching.max_abs == 3.0  # four microbatches against one batch


def test_non_contiguous_boundaries_and_integer_values() -> None:
    run = ran(spec("transposed", TRANSPOSED, 3, n_microbatches=2))
    assert_split_is_exact(run)
    assert any("int64" in name for name in run.stages[1].receives)
    assert {s.microbatching.verdict for s in run.gradients} == {"rounding"}  # no dropout: the same sums, in other order


def test_a_value_that_leaves_by_an_attribute_is_followed() -> None:
    assert_split_is_exact(ran(spec("experts", EXPERTS, 3, n_microbatches=2)))


def test_composed_times_are_the_measured_ones() -> None:
    run = ran(msgspec.structs.replace(spec("language", LANGUAGE, 3, SOME, schedule="1F1B"), n_repeats=1))
    assert run.composed.origin == "measured"
    measured = {time.name: time.duration_ms for time in run.actions}
    assert {t.name: pytest.approx(t.duration_ms) for t in run.composed.actions} == measured  # one timed pass
    assert any(time.recompute_ms > 0 for time in run.actions if time.kind == "B")
    assert run.composed.makespan_ms < sum(measured.values())


def test_an_indivisible_batch_is_explained() -> None:
    with pytest.raises(InvalidPlan, match="8 rows does not divide into 3") as caught:
        ran(spec("language", LANGUAGE, 2, n_microbatches=3))
    assert "1, 2, 4, 8" in caught.value.hint


def test_a_model_that_raises_is_a_result() -> None:
    run = ran(spec("without_a_loss", WITHOUT_A_LOSS, 2))
    assert run.failure.sentence.startswith("Rank 1 failed in 1F0: The model raised ValueError: no loss today")
    assert run.failed_rank == 1
    assert run.stages  # what is known without running stays


def test_the_world_is_left_as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = spec("unet", UNET, 2, Policy.recompute(["up"]))
    loaded = load(plan.model)
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    rng, threads = torch.get_rng_state(), torch.get_num_threads()
    monkeypatch.setattr("explorer.pipeline.engine.run.load_for", lambda spec: loaded)
    run_pipeline(plan)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    assert all(parameter.grad is None for parameter in loaded.model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.model.modules())


def test_behind_a_frozen_stage_a_split_backward_loses_what_the_hazard_says() -> None:
    plan = spec("language", LANGUAGE, 4, schedule="ZBVZeroBubble")
    graph = describe(plan.model)
    still = msgspec.structs.replace(plan, frozen=plan.plan.stages[0])  # the positions train before the first cut
    assert "lost-gradients" not in {one.rule for one in hazards(graph, plan.policy, plan.plan, still)}
    assert not ran(still).moved
    frozen = msgspec.structs.replace(plan, frozen=(*plan.plan.stages[0], "positions"))
    fired = {one.rule: one for one in hazards(graph, plan.policy, plan.plan, frozen)}
    assert fired["lost-gradients"].severity == "error"
    run = ran(frozen)
    assert run.failure is None
    lost = {shares.name for shares in run.gradients if shares.splitting.presence == "baseline only"}
    assert lost, "torch finds the way to the weights from the stage's input, which needs no gradient"
    assert {shares.name for shares in run.moved} == lost
    assert {name.rpartition(".")[0] for name in lost} <= set(fired["lost-gradients"].blocks)
    whole = ran(msgspec.structs.replace(frozen, plan=msgspec.structs.replace(plan.plan, schedule="Interleaved1F1B")))
    assert not whole.moved


def test_what_blocks_hand_on_can_be_read_again_after_a_split_backward() -> None:
    """torch's I detaches in place what a stage sends; a checkpoint of the stage reads it once more in W."""
    run = ran(spec("carrying", CARRYING, 4, Policy.recompute(CARRYING), schedule="ZBVZeroBubble"))
    assert_split_is_exact(run)


def test_a_split_backward_multiplies_recompute_and_warns() -> None:
    run = ran(spec("language", LANGUAGE, 4, SOME, schedule="ZBVZeroBubble"))
    multipliers = {block.fqn: block.multiplier for block in run.blocks}
    assert multipliers["tokens"] == 1.0
    assert multipliers["blocks.2"] > 2.0
    assert any("splits the backward" in note for note in run.notes)


class Sent:
    """Stands for the tensors of one action."""


def alive_after(rows: str, *, one_f_one_b: bool, n_stages: int = 3) -> list[set[str]]:
    """By action, which sends are still alive once it is done."""
    handles = SendHandles(one_f_one_b, n_stages, 4)
    sends: dict[str, weakref.ref[Sent]] = {}
    alive = []
    for name in rows.split():
        sent = Sent()
        sends[name] = weakref.ref(sent)
        handles.after(Action(int(name[0]), name[1], int(name[2])), sent)
        del sent
        gc.collect()
        alive.append({one for one, ref in sends.items() if ref() is not None})
    return alive


def test_sends_live_as_long_as_torchs_schedules_hold_them() -> None:
    """GPipe: to the end. 1F1B: the last gradient until the next, the last warm-up send but one until the drain."""
    assert alive_after("0F0 0F1 0F2", one_f_one_b=False)[-1] == {"0F0", "0F1", "0F2"}
    assert alive_after("2F0 2B0 2F1 2B1", one_f_one_b=True) == [set(), {"2B0"}, {"2B0"}, {"2B1"}]
    alive = alive_after("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", one_f_one_b=True)
    assert [step - {"0B0", "0B1", "0B2", "0B3"} for step in alive] == [set(), *[{"0F1"}] * 4, set(), set(), set()]


@pytest.mark.parametrize(("mode", "again"), [("always", 4), ("except_last", 3), ("never", 0)])
def test_which_microbatches_are_checkpointed(mode: str, again: int) -> None:
    run = ran(spec("language", LANGUAGE, 3, SOME, checkpoint=mode, schedule="1F1B"))
    assert_split_is_exact(run)
    calls = {block.fqn: (block.n_forward, block.n_recompute) for block in run.blocks}
    assert calls["blocks.1"] == (4, again)
    assert calls["head"] == (4, 0)


def test_eval_mode_recomputes_all_the_same() -> None:
    run = ran(msgspec.structs.replace(spec("language", LANGUAGE, 3, SOME), mode="eval"))
    assert_split_is_exact(run)
    assert {block.n_recompute for block in run.blocks if block.fqn in SOME.blocks} == {4}


def test_memory_is_complete() -> None:
    plan = spec("language", LANGUAGE, 3, schedule="GPipe", arguments={"width": 64, "length": 32})
    run = ran(msgspec.structs.replace(plan, optimizer="adamw"))
    for memory in run.memory:
        assert memory.origin == "measured"
        assert memory.optimizer_bytes == 2 * memory.parameter_bytes, "two moments; the net has no buffers"
        assert memory.peak_bytes > memory.parameter_bytes + memory.receive_bytes
        assert memory.peak_action == f"{memory.rank}B0"
        assert list(memory.time_ns) == sorted(memory.time_ns)
        # Parameters, gradients and receive buffers are what is left, and sends that torch still holds.
        assert memory.held_bytes[-1] >= 2 * memory.parameter_bytes + memory.receive_bytes
    whole = 4 * 64 * 32 * 8
    assert [memory.receive_bytes for memory in run.memory] == [whole, 2 * whole, whole]


def test_an_allocation_is_its_ranks_whoever_frees_it() -> None:
    watch = MemoryWatch(CpuDevice())
    readings = PassReadings(build(spec("language", LANGUAGE, 2)), WallClock(), watch)
    with watch.recording():
        with readings.outside(0, "0F0"):
            mine = torch.empty(1000, dtype=torch.uint8)
        with readings.outside(1, "1F0"):
            other = torch.empty(300, dtype=torch.uint8)
            del mine
        with readings.outside(2, "outside actions"):
            """What the watch allocates for itself belongs to neither."""
    clock = (
        ActionTime(rank=0, stage=0, kind="F", microbatch=0, start_ms=0.0, end_ms=1.0),
        ActionTime(rank=1, stage=1, kind="F", microbatch=0, start_ms=1.0, end_ms=2.0),
    )
    first, second = watch.ranks(readings._spans, {0: (50, 0), 1: (7, 5)}, clock)
    assert (first.peak_bytes, first.held_bytes[-1], first.peak_action) == (1050, 50, "0F0")
    assert (second.peak_bytes, second.held_bytes[-1], second.receive_bytes) == (307, 307, 5)
    assert max(first.time_ns) <= 1_000_000 <= max(second.time_ns) and other.numel() == 300


def test_keys_differ_by_block_and_microbatch_and_seed() -> None:
    drawn = set()
    for seed in (0, 1):
        rng = KeyedRng(seed, ("a", "b"))
        for block in ("a", "b"):
            for microbatch in (0, 1):
                rng.enter(block, microbatch)
                drawn.add(torch.rand(()).item())
    assert len(drawn) == 8


def test_dropout_without_keys_depends_on_the_split() -> None:
    run = ran(spec("language", LANGUAGE, 3, keyed_rng=False))
    assert run.n_splitting_equal < len(run.gradients)
    assert max(s.splitting.relative_norm or 0.0 for s in run.gradients) > 1e-3
    assert any("not keyed" in note for note in run.notes)


def test_a_note_names_the_buffers_that_each_microbatch_changes() -> None:
    run = ran(spec("spectral", ("0", "1"), 2))
    assert run.n_splitting_equal == len(run.gradients)
    assert any("changes 0.0.weight_u" in note for note in run.notes)
    assert not any("and changes" in note for note in ran(spec("unet", UNET, 3)).notes)


def test_deferred_batch_norm_moves_once_and_lands_near_the_whole_batch() -> None:
    run = ran(spec("unet", UNET, 3, deferred_batch_norm=True))
    assert_split_is_exact(run)
    for shares in run.buffers:
        if shares.name.startswith("down"):
            assert (shares.microbatching.relative_norm or 0.0) < 1e-5, shares.name
            if shares.name.endswith("num_batches_tracked"):
                assert shares.microbatching.bitwise


def moved(model: nn.Module, parts: list[torch.Tensor], *, enabled: bool) -> list[torch.Tensor]:
    with deferred_batch_norm(model, enabled=enabled):
        for part in parts:
            model(part).sum().backward()
    assert not any(module._forward_pre_hooks for module in model.modules())
    return [value.clone() for value in model.buffers()]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_microbatches_move_them_as_the_whole_batch_does(momentum: float | None) -> None:
    x = torch.randn(8, 3, 5)
    norm = nn.BatchNorm1d(3, momentum=momentum)
    whole = moved(copy.deepcopy(norm), [x], enabled=False)
    deferred = moved(copy.deepcopy(norm), list(x.split(2)), enabled=True)
    each = moved(copy.deepcopy(norm), list(x.split(2)), enabled=False)
    for one, other in zip(whole, deferred, strict=True):
        torch.testing.assert_close(one, other)
    assert [int(n[-1]) for n in (whole, deferred, each)] == [1, 1, 4]


@pytest.mark.parametrize("unit", ["1", "1.0"])
def test_what_runs_again_is_gathered_once(unit: str) -> None:
    """Recomputed by itself, and inside a block whose rerun calls the BatchNorm with its hooks."""
    x = torch.randn(8, 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Tanh()))
    kept = moved(copy.deepcopy(model), list(x.split(2)), enabled=True)
    with apply_policy(model, Policy.recompute([unit])):
        assert all(map(torch.equal, moved(model, list(x.split(2)), enabled=True), kept))


def rows(schedule: str, n_ranks: int, n_microbatches: int, n_local: int):  # noqa: ANN201
    stages = (("x",),) * (n_ranks * n_local)
    return rows_of(PipelinePlan(stages=stages, n_ranks=n_ranks, n_microbatches=n_microbatches, schedule=schedule))


def torch_rows(schedule: str, n_ranks: int, n_microbatches: int, n_local: int) -> tuple[tuple[str, ...], ...]:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    with contextlib.redirect_stdout(io.StringIO()):
        listed = get_schedule_ops(schedule, n_ranks, n_microbatches, n_local)
    flat = [[part for action in row if action for part in (action.sub_actions or (action,))] for row in listed]
    return tuple(tuple(str(part) for part in row if part.computation_type.value in "FBIW") for row in flat)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "1F1B"])
@pytest.mark.parametrize(("n_ranks", "n_microbatches"), [(1, 3), (3, 6), (4, 8)])
def test_our_lists_are_torchs(schedule: str, n_ranks: int, n_microbatches: int) -> None:
    for n_local in {"single": (1,), "v": (2,), "looped": (2, 3)}[SCHEDULES[schedule].shape]:
        ours = format_rows(rows(schedule, n_ranks, n_microbatches, n_local))
        assert ours == torch_rows(schedule, n_ranks, n_microbatches, n_local)


def test_torchs_own_listing_of_1f1b_is_not_what_it_runs() -> None:
    """Why 1F1B is generated here: torch 2.13 lists F1..Fm for the last rank. If this fails, torch mended it."""
    assert torch_rows("1F1B", 2, 2, 1)[1][0] == "1F1"
    assert format_rows(rows("1F1B", 2, 2, 1))[1][0] == "1F0"


def mock_stages(n_ranks: int, n_local: int) -> list[mock.Mock]:
    from torch.distributed.pipelining import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod, stage.num_stages = 0, n_ranks, None, n_ranks * n_local
    return [stage] * n_local


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_torch_loads_the_csv_we_write(schedule: str, tmp_path: Path) -> None:
    ours = rows(schedule, 2, 4, 2)
    (tmp_path / "schedule.csv").write_text(to_csv(ours))
    runtime = torch_adapter.private(torch_adapter.SCHEDULES, "_PipelineScheduleRuntime")(mock_stages(2, 2), 4)
    runtime._load_csv(str(tmp_path / "schedule.csv"))
    assert runtime.pipeline_order_with_comms


def test_a_probe_of_the_clock_stands_at_each_end_of_a_recording() -> None:
    watch = MemoryWatch(CpuDevice())
    with watch.recording():
        tensor = torch.ones(1_000_003)
    sizes = [probe.n_bytes for probe in watch._probes]
    log = watch._recorder.log.n_bytes.tolist()
    first, made, last = (log.index(n_bytes) for n_bytes in (sizes[0], tensor.nbytes, sizes[-1]))
    assert first < made < last


def test_the_private_names_are_there() -> None:
    """On each supported torch; a failure names what went away."""
    assert torch.__version__ >= "2.11"
    for module, name in (
        (torch_adapter.SCHEDULES, "_PipelineScheduleRuntime"),
        (torch_adapter.SCHEDULES, "_Action"),
        (torch_adapter.BACKWARD, "stage_backward_input"),
        (torch_adapter.BACKWARD, "stage_backward_weight"),
    ):
        assert callable(torch_adapter.private(module, name))


def test_a_missing_name_is_a_sentence() -> None:
    with pytest.raises(NotOnThisDevice, match="has no .*_gone"):
        torch_adapter.private(torch_adapter.SCHEDULES, "_gone")
