"""The ways to measure the step of a RunSpec: alone, in a pair, the first that fits, without data.

Two instruments and a clock watch the step. The clock never runs together with the instruments.

warm up        a checkpoint (its first call imports torch._dynamo), then two steps, one of them under the tracker
record         one step, allocator and tracker together      timeline, phases, FLOPs, cost per block
record alone   one step, allocator only                      does watching change the step?
time           n steps with nothing attached                 by phase, in turns where two runs are compared
time blocks    n steps with light hooks                      by block
time operators one step, each operator by itself             shares of a block's time
               3 forwards with every operator dispatched     time of keeping operators' results (save_ops)
time a call    a few small modules, kept and recomputed      time of a checkpoint beside its second forward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from msgspec.structs import replace

from explorer.engine.bench.bench import Bench, Readings, bench_of
from explorer.engine.bench.checkpoint_cost import checkpoint_cost, warm_checkpoint
from explorer.engine.bench.recording import record, recording_of
from explorer.engine.bench.step import (
    OnPhase,
    Trainee,
    gradients,
    ignore,
    optimizer_step,
    prepare,
    torch_device,
    torch_dtype,
    trainee_of,
)
from explorer.engine.device.cuda_rules import cuda_rules
from explorer.engine.device.device import Device, device_of
from explorer.engine.device.memory_limit import failure_in_step, without_page_faults
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.engine.device.without_data import cast_buffers, without_data
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded, blaming, cast_type
from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import BadInput, ExplorerError, OutOfMemory, message_of
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.policy.presets import ladder
from explorer.record.base import Record, to_msgpack
from explorer.record.failure import is_out_of_memory
from explorer.record.measurement import Measurement, Refused
from explorer.record.plan import Progress, Report, silent
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import RunSpec

N_DISPATCHED = 3
"""Steps followed by a further step with every operator dispatched."""

LEFT_OUT = (
    "Predicted: the step was played on tensors without data. What kernels take for themselves is not in it (fused "
    "attention, recurrent layers, convolutions)."
)
ON_THE_CPU = (
    f"{LEFT_OUT[:-1]}, nor what an allocator rounds or keeps.",
    "Predicted on the CPU's kernels: a GPU may take others, with other saved activations. Name a card to have it "
    "played by CUDA's rules.",
)
CPU_AUTOCAST = (
    "Predicted by the CPU's autocast: CUDA's lists of operators differ, and a GPU was measured to hold up to 12 % more."
)


class Meter:
    """Counts `total` steps of a job and reports each at its begin. Steps of a job inside may come first."""

    def __init__(self, report: Report, total: int) -> None:
        self._report = report
        self._done = 0
        self._total = total
        self._n_inside = 0
        self._part = b""

    def __call__(self, what: str) -> None:
        total = self._n_inside + self._total
        self._report(Progress(what=what, done=min(self._n_inside + self._done, total), total=total, part=self._part))
        self._done, self._part = self._done + 1, b""

    def part(self, result: Record) -> None:
        """The next report carries `result`, the job's result as far as it is complete."""
        self._part = to_msgpack(result)

    def inside(self, progress: Progress) -> None:
        """Reports a step of the job inside, as a step of this job."""
        self._n_inside = progress.total
        self._report(replace(progress, total=progress.total + self._total))

    def named(self, name: str) -> Callable[[str], None]:
        """The same meter; each text begins with `name`."""
        return lambda what: self(name + what)


def measure(spec: RunSpec, report: Report = silent) -> Measurement:
    """The run of `spec`. Errors of the model and lack of memory become `failure`; errors of load and prepare pass.

    Bytes come from the allocator, FLOPs and calls are counted, times come from steps without any recording.
    """
    return _measure((spec,), report)[0]


def measure_pair(baseline: RunSpec, candidate: RunSpec, report: Report = silent) -> tuple[Measurement, Measurement]:
    """Both runs from identical state, timed in turns (A, B, A, B). Raises BadInput if other settings differ."""
    refuse_other_settings(baseline, candidate)
    first, second = _measure((baseline, candidate), report)
    return first, second


def refuse_other_settings(baseline: RunSpec, candidate: RunSpec) -> None:
    """Raises BadInput if the runs differ in more than policy and plan."""
    differing = [
        f"{name}: {getattr(baseline, name)!r} and {getattr(candidate, name)!r}"
        for name in RunSpec.__struct_fields__
        if name not in ("policy", "plan") and getattr(baseline, name) != getattr(candidate, name)
    ]
    if differing:
        raise BadInput(
            f"Baseline and candidate differ in more than their policy ({'; '.join(differing)}).",
            hint="Only runs of one model, batch, device and seed can be compared.",
        )


def measure_beside_keep_all(spec: RunSpec, report: Report = silent) -> Measurement:
    """The run of `spec`, timed in turns with steps that keep everything."""
    baseline, run = measure_pair(replace(spec, policy=KEEP_ALL), spec, report)
    if baseline.times is None or run.times is None:
        return run
    return replace(run, times=replace(run.times, beside=baseline.times.step))


def _measure(specs: Sequence[RunSpec], report: Report) -> tuple[Measurement, ...]:
    device, n_repeats = device_of(torch_device(specs[0])), specs[0].n_repeats
    names = ("baseline: ", "candidate: ") if len(specs) > 1 else ("",)
    n_keep_all = sum(not spec.policy.units for spec in specs)
    n_timed = len(specs) * (1 + 2 * n_repeats) + n_keep_all if n_repeats else 0
    meter = Meter(report, 1 + len(specs) * 4 + n_timed)
    with preserve_global_state():
        meter("loading the model")
        loaded = load_for(specs[0])
        warm_checkpoint(device.torch)
        runs = [record(spec, loaded, device, meter.named(name)) for spec, name in zip(specs, names)]
        readings = [Readings(failure=run.failure) for run in runs]
        if len(runs) == 1:
            meter.part(runs[0])
        complete = [(spec, times) for spec, times in zip(specs, readings) if times.failure is None]
        try:
            if complete and n_repeats:
                with without_page_faults():
                    _time(complete, loaded, device, meter)
        except RuntimeError as error:  # a GPU that a failed run has left unusable: earlier recordings stand
            if len(complete) == len(specs):
                raise
            text = f"Nothing was timed: the failure left the device unusable ({message_of(error)})."
            runs = [replace(run, warnings=(*run.warnings, text)) for run in runs]
    return tuple(
        replace(times.added_to(run, device.clock().name), failure=times.failure, free_memory_bytes=device.free_bytes())
        for run, times in zip(runs, readings)
    )


def _time(runs: Sequence[tuple[RunSpec, Readings]], loaded: Loaded, device: Device, meter: Meter) -> None:
    """Times all runs in turns on one model: memory holds one model, and a slow minute affects all runs alike."""
    first = runs[0][0]
    trainee = prepare(first, loaded)
    trainee.handle.undo()
    bench = bench_of(trainee, device)
    for round_ in range(-1, first.n_repeats):
        for spec, readings in runs:
            meter("warming up the clock" if round_ < 0 else f"timing step {round_ + 1} of {first.n_repeats}")
            with _applied(spec, readings, bench, device) as applied:
                if not applied:
                    continue
                if round_ < 0:
                    bench.step(ignore)
                else:
                    readings.steps.append(bench.time())
                if not spec.policy.units and 0 <= round_ < N_DISPATCHED:
                    readings.dispatched.append(bench.time_dispatched())
    for round_ in range(first.n_repeats):
        for spec, readings in runs:
            meter(f"timing blocks, step {round_ + 1} of {first.n_repeats}")
            with _applied(spec, readings, bench, device) as applied:
                if applied:
                    readings.blocks.append(bench.time_blocks(spec.policy))
    for spec, readings in runs:
        if not spec.policy.units and readings.blocks:
            meter("timing operators")
            with _applied(spec, readings, bench, device) as applied:
                if applied:
                    readings.operators = bench.time_operators()
    if any(readings.steps for _, readings in runs):
        for _, readings in runs:
            readings.checkpoint = checkpoint_cost(device.torch)


@contextmanager
def _applied(spec: RunSpec, readings: Readings, bench: Bench, device: Device) -> Iterator[bool]:
    """Applies the policy for one step; yields False if the run has failed. A failure inside is the run's result."""
    if readings.failure is not None:
        yield False
        return
    try:
        with apply_policy(bench.model, spec.policy), device.timed_memory_limit(spec.memory_limit_bytes):
            yield True
    except Exception as error:
        if isinstance(error, ExplorerError) and not is_out_of_memory(error):
            raise
        readings.failure = failure_in_step(error)


def measure_what_fits(spec: RunSpec, report: Report = silent) -> Measurement:
    """The run of `spec`, or the first policy of the ladder that fits if `spec` is out of memory.

    `refused` lists the earlier runs, beginning with `spec`: the least held bytes and the place of the refusal. The
    baseline is composed from the run that fits (plan/predict/baseline.py). Each attempt has its process, because a
    process does not return all memory for the next attempt. If no policy fits, the last attempt is returned with its
    failure. Raises the errors of load and prepare, and OutOfMemory if the system ended even the last attempt.
    """
    refused: list[Refused] = []
    for name, policy in _attempts(spec):
        prefixed = _prefixed(report, f"{refused[-1].what} does not fit, now {name}: ") if refused else report
        attempt, what = replace(spec, policy=policy), f"measured {spec.model.target}"
        run = call_in_subprocess(measure, attempt, report=prefixed, what=what)
        if run is not None and (run.failure is None or run.failure.kind != "out of memory"):
            return replace(run, refused=tuple(refused))
        held_peak_bytes, where = (None, "") if run is None else (run.held_peak_bytes, run.failed_in)
        refused.append(Refused(what=name, policy=policy, held_peak_bytes=held_peak_bytes, failed_in=where))
    if run is None:
        raise OutOfMemory(
            f"The system ended the step for lack of memory, with {name} too.",
            hint="Take a smaller size or batch, or split the batch into microbatches.",
        )
    return replace(run, refused=tuple(refused[:-1]))


def _attempts(spec: RunSpec) -> Iterator[tuple[str, Policy]]:
    yield "the policy" if spec.policy.units else "everything kept", spec.policy
    for name, policy in ladder(describe(spec.model, seed=spec.seed)):
        yield f"{name} recomputed", policy


def _prefixed(report: Report, prefix: str) -> Report:
    return lambda progress: report(replace(progress, what=prefix + progress.what))


def measure_without_data(spec: RunSpec, report: Report = silent) -> Measurement:
    """The predicted memory of the step of `spec`, tick by tick, without memory for the parameters.

    The tracker sees every operator as in a measured step, but no kernel runs. If the spec names a card, CUDA's rules
    are played, and the record says what the card holds. Raises BadInput on CUDA, ModelNotLoaded
    and ModelFailed.
    """
    if spec.device != "cpu":
        raise BadInput("A step without data is played on the CPU.", hint="Leave --device out.")
    device, meter = device_of(torch.device("cpu")), Meter(report, 3)

    def cast(dtype: torch.dtype) -> torch.dtype:
        return cast_type(dtype, torch_dtype(spec))

    def step(trainee: Trainee, on_phase: OnPhase) -> None:
        """The step without its loss, which has no value here."""
        gradients(trainee, on_phase)
        optimizer_step(trainee, on_phase)

    rules = cuda_rules() if spec.card is not None else nullcontext()
    with preserve_global_state(), without_data(cast), rules:
        meter("building the model without data")
        warm_checkpoint(device.torch)
        loaded = load_for(spec)
        cast_buffers(loaded.model, cast)
        with blaming(spec.model, loaded.inputs, "step without data"):
            trainee = trainee_of(spec, loaded)
            meter("playing a step")
            step(trainee, ignore)  # the optimizer makes its state
            meter("playing the step under the tracker")
            with recording_of(trainee, device, data=False) as recording:
                step(trainee, recording.tracker.on_phase)
        run = recording.measurement(spec)
    if spec.card is not None:
        return replace(run, origin="predicted", card=memory_on(spec.card, run), warnings=(LEFT_OUT,))
    texts = ON_THE_CPU if spec.autocast == "none" else (*ON_THE_CPU, CPU_AUTOCAST)
    return replace(run, origin="predicted", warnings=texts)
