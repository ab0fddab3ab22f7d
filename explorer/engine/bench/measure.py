"""Measurement of one step with two instruments and a clock. The clock never runs together with the instruments.

warm up        a checkpoint (its first call imports torch._dynamo), then two steps, one of them under the tracker
record         one step, allocator and tracker together      timeline, phases, FLOPs, cost per block
record alone   one step, allocator only                      does watching change the step?
time           n steps with nothing attached                 by phase, in turns where two runs are compared
time blocks    n steps with light hooks                      by block
time operators one step, each operator by itself            shares of a block's time
               3 forwards with every operator dispatched    time of keeping operators' results (save_ops)
time a call    a few small modules, kept and recomputed      time of a checkpoint beside its second forward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch
from torch.utils.checkpoint import checkpoint

from explorer.engine.bench.block_costs import block_costs, uncounted
from explorer.engine.bench.checkpoint_cost import checkpoint_cost
from explorer.engine.bench.recording import Recorded, record
from explorer.engine.bench.step import Trainee, prepare, run_step, torch_device
from explorer.engine.bench.timing import Timed, block_ms, dispatched_forward_ms, operator_times, step_ms
from explorer.engine.device.device import Device, device_of
from explorer.engine.device.memory_limit import failure_in_step, without_page_faults
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded
from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import BadInput, ExplorerError, OutOfMemory, message_of
from explorer.plan.policy.presets import ladder
from explorer.record.failure import is_out_of_memory
from explorer.record.measurement import Environment, MeasuredBlock, Measurement, Refused
from explorer.record.plan import Progress, Report, silent
from explorer.record.policy import KEEP_ALL
from explorer.record.run import RunSpec

N_LOOKED = 3
"""Steps followed by a further step with every operator dispatched, see timing.py."""

Meter = Callable[[str], None]


def measure(spec: RunSpec, report: Report = silent) -> Measurement:
    """The run of `spec`. Errors of the model and lack of memory become `failure`; errors of load and prepare pass.

    Bytes come from the allocator, FLOPs and calls are counted, times come from steps without any recording.
    """
    return _measure((spec,), report)[0]


def measure_pair(baseline: RunSpec, candidate: RunSpec, report: Report = silent) -> tuple[Measurement, Measurement]:
    """Both runs from identical state, timed in turns (A, B, A, B). Raises BadInput if other settings differ."""
    differing = [
        name
        for name in RunSpec.__struct_fields__
        if name not in ("policy", "plan") and getattr(baseline, name) != getattr(candidate, name)
    ]
    if differing:
        raise BadInput(
            f"Baseline and candidate differ in {', '.join(differing)}; a pair differs in policy and plan alone.",
            hint="Measure them one by one, or give both the same settings.",
        )
    first, second = _measure((baseline, candidate), report)
    return first, second


def measure_beside_keep_all(spec: RunSpec, report: Report = silent) -> Measurement:
    """The run of `spec`, timed in turns with steps that keep everything."""
    kept, run = measure_pair(msgspec.structs.replace(spec, policy=KEEP_ALL), spec, report)
    if kept.times is None or run.times is None:
        return run
    return msgspec.structs.replace(run, times=msgspec.structs.replace(run.times, beside=kept.times.step))


def _measure(specs: Sequence[RunSpec], report: Report) -> tuple[Measurement, ...]:
    device = device_of(torch_device(specs[0]))
    names = ("baseline: ", "candidate: ") if len(specs) > 1 else ("",)
    n_timed = specs[0].n_repeats and len(specs) * (1 + 2 * specs[0].n_repeats)
    kept = sum(not spec.policy.units for spec in specs) if n_timed else 0
    meter = _Meter(report, 1 + len(specs) * 4 + n_timed + kept)
    with preserve_global_state():
        meter("loading the model")
        loaded = load_for(specs[0])
        warm_checkpoint(device.torch)
        recorded = [record(spec, loaded, device, meter.of(name)) for spec, name in zip(specs, names)]
        timed = [Timed() for _ in specs]
        ready = [(spec, clocked) for spec, run, clocked in zip(specs, recorded, timed) if run.failure is None]
        try:
            with without_page_faults():
                _time(ready, loaded, device, meter)
        except RuntimeError as error:  # a GPU that a failed run has left unusable: what was recorded before is kept
            if not any(run.failure is not None for run in recorded):
                raise
            for run in recorded:
                run.warnings.append(f"Nothing was timed: the failure left the device unusable ({message_of(error)}).")
        environment = device.environment(specs[0].n_threads)
    return tuple(_measurement(*parts, device, environment) for parts in zip(specs, recorded, timed))


def _time(ready: Sequence[tuple[RunSpec, Timed]], loaded: Loaded, device: Device, meter: _Meter) -> None:
    """Times all runs in turns on one model: memory holds one model, and a slow minute affects all runs alike."""
    if not ready or not ready[0][0].n_repeats:
        return
    first = ready[0][0]
    trainee = prepare(first, loaded)
    trainee.handle.undo()
    clock = device.clock()
    for round_ in range(-1, first.n_repeats):
        for spec, timed in ready:
            meter("warming up the clock" if round_ < 0 else f"timing step {round_ + 1} of {first.n_repeats}")
            with _ready(timed, trainee, spec, device) as go:
                if not go:
                    continue
                if round_ < 0:
                    run_step(trainee)
                else:
                    timed.steps.append(step_ms(trainee, clock))
                if not spec.policy.units and 0 <= round_ < N_LOOKED:
                    timed.looked_at.append(dispatched_forward_ms(trainee, clock))
    for i in range(first.n_repeats):
        for spec, timed in ready:
            meter(f"timing blocks, step {i + 1} of {first.n_repeats}")
            with _ready(timed, trainee, spec, device) as go:
                if go:
                    timed.blocks.append(block_ms(trainee, spec.policy, clock))
    for spec, timed in ready:
        if not spec.policy.units and timed.blocks:
            meter("timing operators")
            with _ready(timed, trainee, spec, device) as go:
                if go:
                    timed.operators = operator_times(trainee, clock)
    if any(timed.steps for _, timed in ready):
        for _, timed in ready:
            timed.checkpoint = checkpoint_cost(device.torch)


@contextmanager
def _ready(timed: Timed, trainee: Trainee, spec: RunSpec, device: Device) -> Iterator[bool]:
    """Applies the policy for one step; yields False if the run has failed. A failure inside is the run's result."""
    if timed.failure is not None:
        yield False
        return
    try:
        with apply_policy(trainee.model, spec.policy), device.timed_memory_limit(spec.memory_limit_bytes):
            yield True
    except Exception as error:
        if isinstance(error, ExplorerError) and not is_out_of_memory(error):
            raise
        timed.failure = failure_in_step(error)


def _measurement(spec: RunSpec, run: Recorded, timed: Timed, device: Device, environment: Environment) -> Measurement:
    attributed, tracker = run.attribution, run.tracker
    costs: tuple[MeasuredBlock, ...] = ()
    if attributed is not None and tracker is not None:
        costs = block_costs(tracker, attributed.allocations, attributed.phases, spec.policy, timed.block_samples())
    return Measurement(
        spec=spec,
        environment=environment,
        allocations=attributed.allocations if attributed else None,
        phases=attributed.phases if attributed else (),
        peaks=run.peaks,
        blocks=costs,
        times=timed.times(device.clock().name),
        uncounted_ops=uncounted(tracker) if tracker is not None else {},
        dtype=run.dtype,
        loss=run.loss,
        warnings=tuple(run.warnings),
        failure=run.failure or timed.failure,
        free_memory_bytes=device.free_bytes(),
    )


class _Meter:
    """Counts the steps of a measurement and reports its progress."""

    def __init__(self, report: Report, total: int) -> None:
        self._report = report
        self._done = 0
        self._total = total

    def __call__(self, what: str) -> None:
        self._report(Progress(what=what, done=min(self._done, self._total), total=self._total))
        self._done += 1

    def of(self, name: str) -> Meter:
        return lambda what: self(name + what)


def warm_checkpoint(device: torch.device) -> None:
    """Calls torch.utils.checkpoint once: the first call imports torch._dynamo (seconds), at no policy's charge."""
    value = torch.ones(1, device=device, requires_grad=True)
    checkpoint(torch.exp, value, use_reentrant=False).sum().backward()


def measure_what_fits(spec: RunSpec, report: Report = silent) -> Measurement:
    """The run of `spec`, or the first policy of the ladder that fits if `spec` is out of memory.

    `refused` lists the earlier runs, beginning with `spec`. If no policy fits, the last attempt is returned with its
    failure. Raises the errors of load and prepare, and OutOfMemory if the system ended even the last attempt.
    """
    tried, run = "everything kept" if not spec.policy.units else "the policy", _attempt(spec, report)
    refused: list[Refused] = []
    for name, policy in ladder(describe(spec.model, seed=spec.seed)) if _does_not_fit(run) else ():
        refused.append(_refused(run, tried, spec))
        tried, spec = f"{name} recomputed", msgspec.structs.replace(spec, policy=policy)
        run = _attempt(spec, _prefixed(report, f"{refused[-1].what} does not fit, now {tried}"))
        if not _does_not_fit(run):
            break
    if run is None:
        raise OutOfMemory(
            f"The system ended the step for lack of memory, with {tried} too.",
            hint="Take a smaller size or batch, or split the batch into microbatches.",
        )
    return msgspec.structs.replace(run, refused=tuple(refused))


def _does_not_fit(run: Measurement | None) -> bool:
    return run is None or (run.failure is not None and run.failure.kind == "out of memory")


def _refused(run: Measurement | None, tried: str, spec: RunSpec) -> Refused:
    held, where = (None, "") if run is None else (run.held_peak_bytes, run.failed_in)
    return Refused(what=tried, policy=spec.policy, held_peak_bytes=held, failed_in=where)


def _prefixed(report: Report, what: str) -> Report:
    return lambda progress: report(Progress(what=f"{what}: {progress.what}", done=progress.done, total=progress.total))


def _attempt(spec: RunSpec, report: Report) -> Measurement | None:
    """The run in a subprocess; None if the system ended the process for lack of memory. Raises the run's errors."""
    return call_in_subprocess(measure, spec, report=report, what=f"measured {spec.model.target}")
