"""A measurement end to end: figures hold each other up, failures are results, a step without data is the same step."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import msgspec
import pytest
import torch

from explorer.engine.bench import measure as measuring
from explorer.engine.bench.measure import measure, measure_and_describe, measure_pair, measure_without_data
from explorer.engine.bench.step import Trainee, prepare, run_step
from explorer.engine.device.allocator import CpuRecorder, Refusal
from explorer.engine.device.device import CpuDevice
from explorer.engine.device.memory_limit import failure_in_step, out_of_memory, process_memory_limit
from explorer.engine.device.without_data import without_data
from explorer.engine.model.describe import describe
from explorer.engine.model.load import Loaded, load_for
from explorer.errors import BadInput, Cancelled, InvalidPolicy, ModelFailed, OutOfMemory
from explorer.plan.predict.calls import RNG_STATE_BYTES
from explorer.record import Measurement, ModelRef, Policy, RunSpec
from explorer.record.base import from_msgpack
from explorer.record.plan import Progress
from tests.engine.tiny_nets import ref
from tests.zoo import GPT, gpt_pair, sample, sample_run


def test_recompute_lowers_the_peak_and_costs_flops() -> None:
    baseline, candidate = gpt_pair()
    assert candidate.step_peak_bytes < 0.8 * baseline.step_peak_bytes
    assert (candidate.forward_flops, candidate.backward_flops) == (baseline.forward_flops, baseline.backward_flops)
    assert candidate.recompute_flops > baseline.recompute_flops == 0
    assert baseline.loss == candidate.loss and 3 < baseline.loss < 5, "about ln(50): the loss of the initial weights"


def test_forward_alone_needs_what_inference_needs() -> None:
    """Two instruments agree about it, FLOPs are those of a step's forward, nothing is kept for a backward."""
    alone, (step, _) = measure(RunSpec(model=GPT, n_repeats=2, forward_only=True)), gpt_pair()
    assert [span.phase for span in alone.phases] == ["forward"]
    assert alone.step_peak_bytes == alone.peaks.alone_peak_bytes
    assert alone.step_peak_bytes < 0.5 * step.step_peak_bytes
    assert alone.forward_flops == step.forward_flops and alone.backward_flops == 0
    assert alone.saved_after_forward_bytes == 0 and alone.loss == step.loss
    assert alone.times is not None and alone.times.backward.ms == () and len(alone.times.step.ms) == 2


def test_times_have_one_reading_a_repeat() -> None:
    for run in gpt_pair():
        assert run.times.clock == "process CPU time"
        for samples in (run.times.step, run.times.forward, run.times.backward, run.times.optimizer):
            assert len(samples.ms) == 3 and min(samples.ms) > 0
        for whole, *parts in zip(
            run.times.step.ms, run.times.forward.ms, run.times.backward.ms, run.times.optimizer.ms
        ):
            assert whole == pytest.approx(sum(parts))
    baseline, candidate = gpt_pair()
    assert len(candidate.by_fqn["blocks.0"].recompute.ms) == 2
    assert len(candidate.by_fqn[""].recompute.ms) == 2
    assert baseline.by_fqn["blocks.0"].recompute.ms == ()
    assert len(baseline.by_fqn["blocks.0"].forward.ms) == 2
    assert not baseline.by_fqn["blocks.0"].operator_ms and baseline.times and baseline.times.checkpoint_ms is None


@pytest.mark.parametrize("share", [0.0, math.inf], ids=["dear hooks", "cheap hooks"])
def test_blocks_are_timed_within_the_timed_steps_where_their_hooks_are_cheap(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    told: list[Progress] = []
    monkeypatch.setattr("explorer.engine.bench.measure.HOOKS_SHARE", share)
    run = measure(RunSpec(model=ref("chain"), n_repeats=3), told.append)
    assert run.times is not None and len(run.times.step.ms) == 3 and len(run.by_fqn["0.0"].forward.ms) == 2
    assert sum(progress.what.startswith("timing blocks") for progress in told) == (0 if share else 2)
    assert run.by_fqn["0.0"].operator_ms and run.times.checkpoint_ms is not None


def test_progress_is_reported_and_global_state_restored() -> None:
    position, n_threads = torch.get_rng_state(), torch.get_num_threads()
    reports: list[Progress] = []
    run = measure(RunSpec(model=ref("chain"), n_repeats=2), reports.append)
    assert torch.equal(torch.get_rng_state(), position) and torch.get_num_threads() == n_threads
    assert torch.is_grad_enabled()
    assert [p.done for p in reports] == list(range(len(reports)))
    assert reports[-1].total == len(reports)
    recorded, timed = [from_msgpack(p.part, Measurement) for p in reports if p.part]
    assert recorded.step_peak_bytes == run.step_peak_bytes and recorded.times is None
    assert timed.times is not None and run.times is not None and timed.times.step == run.times.step


def test_a_cancel_ends_the_run() -> None:
    def stop(progress: Progress) -> None:
        if "recording" in progress.what:
            raise Cancelled("A person ended the run.")

    with pytest.raises(Cancelled):
        measure(RunSpec(model=ref("chain"), n_repeats=1), stop)


def test_a_graph_comes_first_and_a_run_that_is_not_timed_takes_three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a model and measuring it in one job: a copy is watched, and the step is the same."""
    builds, steps, reports, alone_reports = list[RunSpec](), list[object](), list[Progress](), list[Progress]()
    monkeypatch.setattr(measuring, "load_for", lambda spec: builds.append(spec) or load_for(spec))
    for module in ("recording", "bench"):
        monkeypatch.setattr(f"explorer.engine.bench.{module}.run_step", lambda *of: steps.append(of) or run_step(*of))
    spec = RunSpec(model=ref("chain"), n_repeats=0)
    run, alone = measure_and_describe(spec, reports.append), measure(spec, alone_reports.append)
    assert len(builds) == 2, "one a job"
    first, recorded = [from_msgpack(p.part, Measurement) for p in reports if p.part][:2]
    assert first.graph == describe(spec.model) == run.graph and first.allocations is None
    assert recorded.allocations is not None and recorded.step_peak_bytes == run.step_peak_bytes == alone.step_peak_bytes
    assert (run.loss, run.total_flops) == (alone.loss, alone.total_flops)
    assert alone.times is None and alone.failure is None
    assert len(steps) == 2 * 3 and alone_reports[0].total == len(alone_reports) == 1 + 3


def test_out_of_memory_is_a_result_with_the_timeline_so_far() -> None:
    run = measure(RunSpec(model=ref("greedy", n_bytes=2**50), n_repeats=1))
    assert (run.failure.kind, run.failure.asked_bytes) == ("out of memory", 2**50)
    assert run.failure.free_bytes is not None and 0 < run.failure.free_bytes < 2**50
    assert run.times is None and "aten.tanh.default" in {run.allocations.ops[op] for op in run.allocations.op}
    assert [span.phase for span in run.phases] == ["forward"] and run.by_fqn["first"].n_forward == 1


def test_a_failure_while_timing_keeps_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("explorer.engine.bench.bench.Bench.time", refuse)
    run = measure(RunSpec(model=ref("chain"), n_repeats=1))
    assert run.failure is not None and run.failure.kind == "out of memory"
    assert run.times is None
    assert run.step_peak_bytes is None and run.held_peak_bytes and run.by_fqn["0.0"].n_forward == 1


def test_a_memory_limit_is_met_and_taken_back() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    run = measure(RunSpec(model=ref("greedy", n_bytes=2**31), n_repeats=1, memory_limit_bytes=2**29))
    assert run.failure is not None and (run.failure.kind, run.failure.asked_bytes) == ("out of memory", 2**31)
    assert run.failure.free_bytes is not None and run.failure.free_bytes <= 2**29
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    with process_memory_limit(None):
        assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_model_that_raises_is_a_result_with_its_traceback() -> None:
    run = measure(RunSpec(model=ref("raises"), n_repeats=1))
    assert run.failure.kind == "model raised" and "does not fit" in run.failure.sentence
    assert "tiny_nets.py" in run.failure.traceback
    assert run.allocations is not None and run.by_fqn["first"].n_forward == 1


def test_the_callers_mistakes_are_raised() -> None:
    with pytest.raises(InvalidPolicy):
        measure(RunSpec(model=ref("chain"), policy=Policy.recompute(["nowhere"])))
    with pytest.raises(BadInput, match="more than their policy .dtype: 'own' and 'float64'; seed: 0 and 1"):
        measure_pair(RunSpec(model=ref("chain")), RunSpec(model=ref("chain"), seed=1, dtype="float64"))


TORCHS_REFUSAL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.70 GiB of which 512.00 MiB is "
    "free. Of the allocated memory 14.00 GiB is allocated by PyTorch"
)
"""Rounded to hundredths, as torch writes it."""


def test_messages_of_torch_are_read_and_unknown_bytes_are_not_zero() -> None:
    cpu = failure_in_step(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."))
    cuda = failure_in_step(torch.OutOfMemoryError(TORCHS_REFUSAL))
    unknown = failure_in_step(MemoryError())
    assert {failure.kind for failure in (cpu, cuda, unknown)} == {"out of memory"}
    assert cpu.asked_bytes == 4096
    assert (cuda.asked_bytes, cuda.free_bytes) == (2 * 2**30, 512 * 2**20)
    assert (unknown.asked_bytes, unknown.free_bytes) == (None, None) and "0 bytes" not in unknown.sentence
    assert "7 bytes were free" in out_of_memory(Refusal(None, 7), "").sentence
    limit = OutOfMemory("CUDA out of memory.", asked_bytes=cuda.asked_bytes, free_bytes=0)
    limit.__cause__ = torch.OutOfMemoryError(TORCHS_REFUSAL)
    for rounded in (cuda, failure_in_step(limit)):
        assert "asked for about 2.00 GiB" in rounded.sentence and " bytes" not in rounded.sentence
    assert "4,096 bytes" in cpu.sentence


class Broken(CpuDevice):
    """A GPU whose context an assertion has ended: every later call raises."""

    broken = False

    def check(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def recorder(self) -> CpuRecorder:
        self.check()
        return super().recorder()

    def release(self) -> None:
        self.check()


def test_a_device_that_one_run_breaks_is_the_result_of_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Broken()

    def broken_by_the_candidate(spec: RunSpec, loaded: Loaded | None = None) -> Trainee:
        device.broken |= bool(spec.policy.units)
        device.check()
        return prepare(spec, loaded)

    monkeypatch.setattr("explorer.engine.bench.measure.device_of", lambda where: device)
    for place in ("measure", "recording"):
        monkeypatch.setattr(f"explorer.engine.bench.{place}.prepare", broken_by_the_candidate)
    plain = RunSpec(model=ref("chain"), n_repeats=1)
    baseline, candidate = measure_pair(plain, msgspec.structs.replace(plain, policy=Policy.recompute(["0"])))
    assert baseline.failure is None and baseline.step_peak_bytes and baseline.times is None
    assert "left the device unusable" in baseline.warnings[-1]
    assert candidate.failure is not None and "device-side assert" in candidate.failure.sentence


WIDE = """
import torch
from torch import nn

def build(width, depth):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))), torch.randn(2, width)

class Picky(nn.Linear):
    def forward(self, x):
        return super().forward(x[x.mean(1) * self.bias.mean() > 0])

def picky():
    return nn.Sequential(nn.Linear(4, 4), Picky(4, 4)), torch.randn(2, 4)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "wide.py"
    path.write_text(WIDE)
    return path


def costs(run: Measurement) -> list[tuple[str, int, int, int, int]]:
    """The bytes and FLOPs of each layer that is kept. Around those, attention and checkpoint keep generator states."""
    parents = {block.fqn.rpartition(".")[0] for block in run.blocks}
    of_kept = (block for block in run.blocks if block.fqn not in parents and not block.n_recompute)
    return [
        (one.fqn, one.saved_after_forward_bytes, one.at_peak_bytes, one.forward_flops, one.backward_flops)
        for one in of_kept
    ]


def nearly(predicted: Measurement, real: Measurement) -> bool:
    """Equal but for the few bytes of the loss and of numbers that kernels were given as tensors.

    The tracker of a real step does not see the generator's state that each live checkpoint keeps.
    """
    peak, tracked = predicted.step_peak_bytes, real.peaks.tracker_peak_bytes
    kept = RNG_STATE_BYTES * len(real.spec.policy.units)
    return peak is not None and tracked is not None and abs(peak - tracked - kept) <= 8


@pytest.mark.parametrize("policy", [Policy(), Policy.recompute(["blocks.0"])], ids=["kept", "recomputed"])
def test_a_step_without_data_holds_what_the_tracker_sees_in_a_real_one(policy: Policy) -> None:
    spec = RunSpec(model=sample("gpt"), policy=policy, n_repeats=0)
    predicted, real = measure_without_data(spec), measure(spec)
    assert predicted.origin == "predicted" and predicted.times is None and predicted.warnings
    assert nearly(predicted, real)
    assert (predicted.forward_flops, predicted.recompute_flops) == (real.forward_flops, real.recompute_flops)
    assert [block.n_recompute for block in predicted.blocks] == [block.n_recompute for block in real.blocks]
    assert costs(predicted) == costs(real)


def test_a_model_of_many_gibibytes_is_described_and_predicted(file: Path) -> None:
    ref = ModelRef(target=f"{file}:build", arguments={"width": 2**14, "depth": 40})
    described_gpt, _ = sample_run("gpt")
    with without_data():
        graph = describe(ref)
        assert describe(sample("gpt")) == described_gpt, "dropout included"
    parameter_bytes = 40 * (2**28 + 2**14) * 4
    assert graph.by_fqn[""].parameter_bytes == parameter_bytes > 40 * 2**30
    run = measure_without_data(RunSpec(model=ref, optimizer="sgd"))
    assert run.step_peak_bytes is not None and run.step_peak_bytes > 2 * parameter_bytes, "gradients beside them"


def test_a_type_that_is_asked_for_is_that_of_the_parameters(file: Path) -> None:
    spec = RunSpec(
        model=ModelRef(target=f"{file}:build", arguments={"width": 8, "depth": 2}), dtype="bfloat16", n_repeats=0
    )
    run = measure_without_data(spec)
    assert run.dtype == "bfloat16" and nearly(run, measure(spec))


def test_what_decides_by_its_data_is_refused_in_a_sentence(file: Path) -> None:
    with pytest.raises(ModelFailed, match="decides by values that it computes") as refused:
        measure_without_data(RunSpec(model=ModelRef(target=f"{file}:picky")))
    assert "--set" in str(refused.value)
    with pytest.raises(BadInput, match="on the CPU"):
        measure_without_data(RunSpec(model=sample("gpt"), device="cuda"))
