"""Recording of one step of a run with both instruments, and of a second step with the allocator alone.

Watching can change a step: nn.MultiheadAttention leaves its fused path under a dispatch mode. The step is therefore
repeated without the tracker and with the same random numbers. A warning names a difference between the two peaks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from explorer.engine.bench.attribution import Attribution, attribute
from explorer.engine.bench.memory import held_bytes, memory_limit, optimizer_tensors, run_within_limit, trainee_tensors
from explorer.engine.bench.step import Trainee, prepare, run_step
from explorer.engine.device.allocator import AllocatorLog, Probe, Refusal, clock_skew_ns, peak_bytes, take_probe
from explorer.engine.device.device import Device
from explorer.engine.device.memory_limit import failure_in_step, first_step, out_of_memory
from explorer.engine.model.loaded import Loaded, types_of
from explorer.engine.policy.offload import HOST
from explorer.engine.state.rng import RngState
from explorer.engine.watch.checkpoint_error import failure_in_words
from explorer.engine.watch.storages import NONE
from explorer.engine.watch.tracker import FORWARD, OP_COLUMNS, Tracker
from explorer.errors import ExplorerError
from explorer.record.allocations import ROLES
from explorer.record.failure import Failure, is_out_of_memory
from explorer.record.measurement import AllocatorPeaks
from explorer.record.run import RunSpec

CHANGES_THE_STEP = 0.005
"""Difference of the two peaks, as a share of the peak, above which a warning blames the tracker."""


@dataclass
class Recorded:
    """Results of the recording of one run. Fields after a failure are missing."""

    tracker: Tracker | None = None
    attribution: Attribution | None = None
    log: AllocatorLog | None = None
    alone_peak_bytes: int | None = None
    steady_reserved_bytes: int | None = None
    offloaded_bytes: int | None = None
    dtype: str = ""
    loss: float | None = None
    """Loss of the first step, from the initial weights."""
    warnings: list[str] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def peaks(self) -> AllocatorPeaks:
        if self.log is None or self.attribution is None:
            return AllocatorPeaks()
        return AllocatorPeaks(
            alone_peak_bytes=self.alone_peak_bytes,
            tracker_peak_bytes=self.attribution.tracker_peak_bytes,
            requested_peak_bytes=self.log.requested_peak_bytes,
            allocated_peak_bytes=self.log.allocated_peak_bytes,
            reserved_peak_bytes=self.log.reserved_peak_bytes,
            steady_reserved_peak_bytes=self.steady_reserved_bytes,
            offloaded_peak_bytes=self.offloaded_bytes,
            allocated=self.attribution.allocated,
            reserved=self.attribution.reserved,
        )


def record(spec: RunSpec, loaded: Loaded, device: Device, meter: Callable[[str], None]) -> Recorded:
    """Records a warm-up, a step with both instruments, and a step with the allocator alone."""
    run = Recorded()

    def begun() -> tuple[Trainee, RngState]:
        """A trainee and its random state, so that every step skips the same layers if layers are skipped at random."""
        device.release()
        trainee = prepare(spec, loaded)
        return trainee, RngState.capture(trainee.model)

    with _heard(run), _failures_kept(run):
        warm = None
        with _failures_kept(run):
            meter("warming up")
            warm, run.loss = first_step(device.release, begun, lambda ready: run_within_limit(device, ready[0]))
            meter("warming up under the tracker")
            warm[1].restore()
            with tracker_of(warm[0]):
                run_within_limit(device, warm[0])
        trainee, drawn = warm or begun()
        run.dtype = types_of(trainee.model)
        device.release()
        meter("recording the step")
        drawn.restore()
        watched_step(run, trainee, device)
        if run.failure is None:
            meter("recording the step without the tracker")
            drawn.restore()
            _step_alone(run, trainee, device)
    return run


def watched_step(run: Recorded, trainee: Trainee, device: Device) -> None:
    """Records one step with both instruments in `run`. A failed step keeps its recording until the failure."""
    trainee.model.zero_grad(set_to_none=True)
    recorder, tracker = device.recorder(), tracker_of(trainee)
    probes: list[Probe] = []
    HOST.restart()
    with _failures_kept(run, trainee.model), recorder:
        probes.append(take_probe(device.torch))
        try:
            with tracker:
                try:
                    with memory_limit(device, trainee):
                        run_step(trainee, tracker.on_phase)
                finally:
                    tracker.storages.tag(optimizer_tensors(trainee.model, trainee.optimizer))
        finally:
            with suppress(Exception):  # a device without memory has none for a probe either
                probes.append(take_probe(device.torch, number=1))
    if any(unit.action == "offload" for unit in trainee.spec.policy.units):
        run.offloaded_bytes = HOST.peak_bytes
    log = recorder.log
    if run.failure is not None and log.refusal is not None and run.failure.kind == "out of memory":
        run.failure = out_of_memory(_refusal(log.refusal, run.failure.free_bytes), run.failure.traceback)
    attributed = attribute(log, tracker, clock_skew_ns(log, probes))
    run.tracker, run.attribution = tracker, attributed
    run.log = log
    run.warnings += doubts(log, max(attributed.allocations.held_bytes))


def doubts(log: AllocatorLog, drawn_bytes: int) -> list[str]:
    """Sentences about contradictions between the allocator's counters and the timeline's peak of `drawn_bytes`."""
    own_bytes = log.requested_peak_bytes
    if not log.is_complete:
        own = "" if own_bytes is None else f" (the allocator's own requested peak is {own_bytes:,} bytes)"
        return [
            "The allocator's history was full before the step ended: the timeline lacks its beginning, and a peak "
            f"that lay there{own}."
        ]
    if own_bytes is not None and own_bytes != drawn_bytes:
        return [f"The drawn peak is {drawn_bytes:,} bytes; the allocator's own requested peak is {own_bytes:,} bytes."]
    return []


def _refusal(exact: Refusal, free_bytes: int | None) -> Refusal:
    """The refusal with the history's exact request, and the least reported free bytes, a limit's rest included."""
    known = [n_bytes for n_bytes in (exact.free_bytes, free_bytes) if n_bytes is not None]
    return Refusal(exact.asked_bytes, min(known, default=None))


def tracker_of(trainee: Trainee) -> Tracker:
    """A tracker with the tensors that are in memory before the step."""
    segments = [unit.blocks[0] for unit in trainee.spec.policy.units if len(unit.blocks) > 1]
    return Tracker(trainee.model, trainee.device, trainee_tensors(trainee), segments=segments)


def _step_alone(run: Recorded, trainee: Trainee, device: Device) -> None:
    trainee.model.zero_grad(set_to_none=True)
    base_bytes = held_bytes(trainee)
    recorder = device.recorder()
    with recorder:
        run_within_limit(device, trainee)
    log = recorder.log
    alone = peak_bytes(log, base_bytes if log.base_bytes is None else log.base_bytes)
    run.alone_peak_bytes = alone
    run.steady_reserved_bytes = log.reserved_peak_bytes  # the cache is as the watched step left it
    assert run.attribution is not None
    watched = max(run.attribution.allocations.held_bytes)
    if abs(watched - alone) > CHANGES_THE_STEP * alone:
        run.warnings.append(
            f"Being watched changes this model's step: it peaks at {watched:,} bytes under the tracker and at "
            f"{alone:,} bytes without. The timeline shows the watched step."
        )


@contextmanager
def _failures_kept(run: Recorded, model: nn.Module | None = None) -> Iterator[None]:
    """Turns out of memory and the model's errors into the run's failure. Mistakes of the caller pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ExplorerError) and not is_out_of_memory(error):
            raise
        run.failure = failure_in_step(error) if model is None else failure_in_words(error, model)


@contextmanager
def _heard(run: Recorded) -> Iterator[None]:
    """Adds the warnings of torch and the model to the run, each sentence once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    run.warnings = list(dict.fromkeys([*(str(warning.message) for warning in caught), *run.warnings]))


EMPTY = "aten.empty.memory_format"
GRADIENT = ROLES.index("gradient")


def tag_buckets(model: nn.Module, tracker: Tracker) -> None:
    """Tags the storages that DDP's forward allocated and still holds as gradients. Call before the tracker forgets."""
    wrappers = {fqn for fqn, module in model.named_modules() if isinstance(module, DistributedDataParallel)}
    blocks = {number for number, fqn in enumerate(tracker.fqns) if fqn in wrappers}
    if not blocks:
        return
    seen = tracker.storages
    for index, op in enumerate(seen.made_by):
        if op == NONE or seen.role[index] != NONE or seen.died_ns[index] != NONE:
            continue
        name, block, phase, *_ = tracker.ops[op * len(OP_COLUMNS) : (op + 1) * len(OP_COLUMNS)]
        if block in blocks and phase == FORWARD and tracker.op_names[name] == EMPTY:
            seen.role[index], seen.owner[index] = GRADIENT, block
