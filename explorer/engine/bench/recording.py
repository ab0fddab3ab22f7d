"""Recording of one step with two instruments: the allocator sees every byte, the tracker names storages.

Watching can change a step: nn.MultiheadAttention leaves its fused path under a dispatch mode. `record` therefore
repeats the step of a RunSpec without the tracker and with the same random numbers, and compares the peaks.
"""

from __future__ import annotations

import warnings
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from msgspec.structs import replace
from torch import nn

from explorer.engine.bench.attribution import (
    Attribution,
    attribute,
    block_costs,
    uncounted,
    watch_releases,
    with_releases,
)
from explorer.engine.bench.bench import bench_of
from explorer.engine.bench.memory import (
    Optimizers,
    bytes_before_step,
    gradient_tensors,
    memory_limit,
    optimizer_tensors,
    trainee_tensors,
)
from explorer.engine.bench.step import OnPhase, Trainee, ignore, prepare, run_step, segment_heads, torch_device
from explorer.engine.bench.timeline import as_ints
from explorer.engine.device.allocator import AllocatorLog, Probe, Refusal, clock_skew_ns, peak_bytes, take_probe
from explorer.engine.device.device import Device, device_of
from explorer.engine.device.kernel_memory import KernelMemory
from explorer.engine.device.memory_limit import failure_in_step, first_step, out_of_memory
from explorer.engine.device.without_data import generator_states_as_results, is_without_data
from explorer.engine.model.loaded import Loaded, types_of
from explorer.engine.policy.offload import HOST
from explorer.engine.state.rng import RngState
from explorer.engine.watch.checkpoint_calls import CheckpointCalls
from explorer.engine.watch.checkpoint_error import failure_in_words
from explorer.engine.watch.storages import NONE, KnownTensor
from explorer.engine.watch.tracker import Tracker
from explorer.errors import ExplorerError
from explorer.record.allocations import PHASES, Allocations, Collective
from explorer.record.failure import Failure, is_out_of_memory
from explorer.record.measurement import AllocatorPeaks, Measurement
from explorer.record.run import RunSpec

if TYPE_CHECKING:
    from explorer.engine.watch.saved_tensors import SavedTensors

Watch = Callable[[Trainee], tuple[AbstractContextManager[object], OnPhase]]
"""The instrument around the first step of a trainee, and what the step announces its phases to."""

CHANGES_THE_STEP = 0.005
"""Difference of the two peaks, as a share of the peak, above which a warning blames the tracker."""


class Recording:
    """Both instruments between enter and exit, also for a step that raises. `data` False: no allocator is recorded.

    Without data the births and deaths of storages seen by the tracker take the place of the allocator's events.
    """

    def __init__(self, model: nn.Module, tracker: Tracker, device: Device, *, data: bool = True) -> None:
        self.tracker = tracker
        self.optimizers: Optimizers = None
        """Optimizers of the step, whose state is named at the exit."""
        self._model, self._device = model, device
        self._checkpoints = CheckpointCalls(model, tracker)
        self._recorder = device.recorder() if data else None
        self.saved: SavedTensors | None = None
        """What autograd saves, where that is noted."""
        self.keeps_generator_states = False
        """Whether the step's device is the CPU, whose memory holds them, and no allocator shows them."""
        self._probes: list[Probe] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        HOST.restart()
        with ExitStack() as opened:
            if self._recorder is not None:
                opened.enter_context(self._recorder)
                opened.callback(self._probe)
                self._probe()
            if self.keeps_generator_states:
                opened.enter_context(generator_states_as_results())
            opened.enter_context(self.tracker)
            opened.enter_context(self._checkpoints.watching())
            if self.saved is not None:
                opened.enter_context(self.saved.watching())
            opened.callback(self._name_results)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._open.__exit__(*exc)

    @cached_property
    def log(self) -> AllocatorLog:
        """The allocator's events, or those of the tracker's storages."""
        return events_of(self.tracker) if self._recorder is None else self._recorder.log

    @cached_property
    def attribution(self) -> Attribution:
        """The timeline of the recorded step."""
        return attribute(self.log, self.tracker, clock_skew_ns(self.log, self._probes), self.saved)

    def measurement(self, spec: RunSpec) -> Measurement:
        """The recorded step as the measurement of `spec`, without times."""
        allocations, phases, peaks = self.attribution
        peaks = AllocatorPeaks() if self._recorder is None else peaks
        if any(unit.action == "offload" for unit in spec.policy.units):
            peaks = replace(peaks, offloaded_peak_bytes=self._host_peak_bytes)
        cards = {str(tensor.device) for tensor in self._model.parameters()} - {"cpu", str(self._device.torch)}
        others = [f"The model also lies on {', '.join(cards)}: the figures are those of {self._device.torch}."]
        return Measurement(
            spec=spec,
            environment=self._device.environment(spec.n_threads),
            allocations=allocations,
            phases=phases,
            peaks=peaks,
            blocks=block_costs(self.tracker, allocations, phases, spec.policy),
            uncounted_ops=uncounted(self.tracker),
            collectives=collectives_of(self.tracker, allocations),
            own_checkpointing=self._own_checkpointing,
            dtype=types_of(self._model),
            warnings=(*doubts(self.log, max(allocations.held_bytes)), *(others if cards else ())),
        )

    def with_exact_bytes(self, failure: Failure) -> Failure:
        """`failure` with operator, block and exact bytes, where memory ran out: torch's text rounds the bytes."""
        if failure.kind != "out of memory":
            return failure
        if (exact := self.log.refusal) is not None:
            # The least of the reported free bytes includes a limit's rest.
            free = [n_bytes for n_bytes in (exact.free_bytes, failure.free_bytes) if n_bytes is not None]
            failure = out_of_memory(Refusal(exact.asked_bytes, min(free, default=None)), failure.traceback)
        place = self.tracker.refused_in
        return replace(failure, sentence=failure.sentence.replace(" and was refused", f"{place} and was refused"))

    def _probe(self) -> None:
        with suppress(Exception):  # a device without memory has none for a probe either
            self._probes.append(take_probe(self._device.torch, number=len(self._probes)))

    def _name_results(self) -> None:
        self.tracker.storages.tag(optimizer_tensors(self._model, self.optimizers))
        self.tracker.storages.tag(gradient_tensors(self._model))  # FSDP's have no hook
        self._own_checkpointing = self._checkpoints.result()
        self._host_peak_bytes = HOST.peak_bytes


def recording_of(
    trainee: Trainee, device: Device, *, data: bool = True, older: Sequence[KnownTensor] = ()
) -> Recording:
    """The instruments for the next step of `trainee`, whose gradients are cleared.

    `older` are tensors from before the step that the trainee does not lead to.
    """
    trainee.model.zero_grad(set_to_none=True)
    recording = Recording(trainee.model, tracker_of(trainee, older), device, data=data)
    recording.optimizers = trainee.optimizer
    recording.keeps_generator_states = not data and trainee.spec.card is None
    if not trainee.spec.policy.units and trainee.whole is None:
        from explorer.engine.watch.saved_tensors import SavedTensors  # a step of a user's loop goes without

        recording.saved = SavedTensors(recording.tracker)
    return recording


def tracker_of(trainee: Trainee, older: Sequence[KnownTensor] = ()) -> Tracker:
    """A tracker with the tensors that are in memory before the step, and `older` ones."""
    segments, before = segment_heads(trainee.spec.policy), [*trainee_tensors(trainee), *older]
    tracker = Tracker(trainee.model, trainee.device, before, segments=segments)
    tracker.storages.kernels = KernelMemory(trainee.spec.card) if is_without_data() else None
    return tracker


def under_tracker(trainee: Trainee) -> tuple[Tracker, OnPhase]:
    """A `Watch` that warms up what the recorded step runs."""
    return tracker_of(trainee), ignore


@dataclass
class FurtherSteps:
    """Steps of a recording before and after the recorded one. The runs of one model share the object in turn."""

    watch: Watch = under_tracker
    """Watches the warm-up, which has to run under a dispatch mode."""
    releases: Tracker | None = None
    """A forward without autograd: under every policy it makes the same tensors in the same order."""
    alone: bool = True
    """Whether a step is taken with the allocator alone."""


def record(
    spec: RunSpec,
    loaded: Loaded,
    meter: Callable[[str], None],
    recorded: Callable[[Measurement], None] = lambda run: None,
    further: FurtherSteps | None = None,
) -> Measurement:
    """Records a step with both instruments after a warm-up, and a step with the allocator alone. No step is timed.

    `recorded` gets the run with its timeline, before any further step. Lack of memory and errors of the model become
    `failure`. Mistakes of the caller raise.
    """
    device, further = device_of(torch_device(spec)), further or FurtherSteps()
    run = Measurement(spec=spec, environment=device.environment(spec.n_threads))
    failures: list[Failure] = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with _failures_in(failures):
            meter("warming up")
            trainee, drawn, loss = _warmed_trainee(spec, loaded, further.watch, failures)
            run = replace(run, loss=loss, dtype=types_of(trainee.model), batch=trainee.batch_text)
            device.release()
            meter("recording the step")
            drawn.restore()
            recording = record_step(trainee, device, failures)
            run = replace(recording.measurement(spec), loss=loss, batch=run.batch)
            if not failures:
                recorded(run)
                if further.alone or drawn.generators:
                    meter("recording the step without the tracker")
                    run = with_peak_alone(run, trainee, drawn)
                if further.releases is None:
                    drawn.restore()
                    further.releases = watch_releases(trainee, tracker_of(trainee))
                run = with_releases(run, further.releases)
    texts = [*(str(warning.message) for warning in shown), *run.warnings]
    return replace(run, warnings=tuple(dict.fromkeys(texts)), failure=failures[-1] if failures else None)


def _warmed_trainee(
    spec: RunSpec, loaded: Loaded, watch: Watch, failures: list[Failure]
) -> tuple[Trainee, RngState, float | None]:
    """A trainee after its first step, which makes the optimizer's state and warms the kernels to be recorded.

    Also returns the random state before the step, so that every step skips the same layers if layers are skipped at
    random, and the loss. If the step fails: a new trainee and no loss.
    """
    device = device_of(torch_device(spec))

    def begin() -> tuple[Trainee, RngState]:
        device.release()
        trainee = prepare(spec, loaded)
        return trainee, RngState.capture(trainee.model)

    def take(begun: tuple[Trainee, RngState]) -> float:
        trainee, _ = begun
        instrument, on_phase = watch(trainee)
        with instrument, memory_limit(device, trainee):
            return run_step(trainee, on_phase)

    with _failures_in(failures):
        begun, loss = first_step(device.release, begin, take)
        return (*begun, loss)
    return (*begin(), None)


def record_step(trainee: Trainee, device: Device, failures: list[Failure]) -> Recording:
    """Records one step. A failed step keeps its recording until the failure, which is added to `failures`."""
    recording = recording_of(trainee, device)
    before = len(failures)
    with _failures_in(failures, trainee.model), recording, memory_limit(device, trainee):
        run_step(trainee, recording.tracker.on_phase)
    if len(failures) > before:
        failures[-1] = recording.with_exact_bytes(failures[-1])
    return recording


def with_peak_alone(run: Measurement, trainee: Trainee, drawn: RngState) -> Measurement:
    """`run` with the peak of one more step that the allocator alone watches, and a warning if the peaks differ.

    The first step that is not watched may take kernels that no step took before, and with them memory that is taken
    once: a peak that differs is read again.
    """
    device = device_of(trainee.device)
    for _ in range(2):
        drawn.restore()
        trainee.model.zero_grad(set_to_none=True)
        base_bytes = bytes_before_step(trainee)
        recorder = device.recorder()
        with recorder:
            bench_of(trainee, device).take()
        log = recorder.log
        alone = peak_bytes(log, base_bytes if log.base_bytes is None else log.base_bytes)
        if is_near(run, alone):
            break
    # The cache is as the watched step left it.
    peaks = replace(run.peaks, alone_peak_bytes=alone, steady_reserved_peak_bytes=log.reserved_peak_bytes)
    if is_near(run, alone):
        return replace(run, peaks=peaks)
    text = (
        f"Being watched changes this model's step: it peaks at {run.held_peak_bytes or 0:,} bytes under the tracker "
        f"and at {alone:,} bytes without. The timeline shows the watched step."
    )
    return replace(run, peaks=peaks, warnings=(*run.warnings, text))


def is_near(run: Measurement, alone_bytes: int) -> bool:
    """Whether the recorded peak is the peak of the step that the allocator alone watches."""
    return abs((run.held_peak_bytes or 0) - alone_bytes) <= CHANGES_THE_STEP * alone_bytes


def doubts(log: AllocatorLog, drawn_bytes: int) -> list[str]:
    """Sentences about contradictions between the allocator's counters and the timeline's peak of `drawn_bytes`."""
    n_bytes = log.requested_peak_bytes
    doubt = [f"Allocated and reserved bytes have no curve: {log.contradiction}"] if log.contradiction else []
    if not log.is_complete:
        peak = "" if n_bytes is None else f" (the allocator's own requested peak is {n_bytes:,} bytes)"
        return doubt + [
            "The allocator's history was full before the step ended: the timeline lacks its beginning, and a peak "
            f"that lay there{peak}."
        ]
    if n_bytes is not None and n_bytes != drawn_bytes:
        doubt.append(
            f"The drawn peak is {drawn_bytes:,} bytes; the allocator's own requested peak is {n_bytes:,} bytes."
        )
    return doubt


@contextmanager
def _failures_in(failures: list[Failure], model: nn.Module | None = None) -> Iterator[None]:
    """Adds out of memory and the model's errors to `failures`. Mistakes of the caller pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ExplorerError) and not is_out_of_memory(error):
            raise
        failures.append(failure_in_step(error) if model is None else failure_in_words(error, model))


def events_of(tracker: Tracker) -> AllocatorLog:
    """The step's storages in the form of an allocator's log, each with a unique address."""
    columns = tracker.storages
    columns.pointer = array("q", range(1, len(columns.n_bytes) + 1))
    turns = as_ints(columns.turns)
    number = np.abs(turns) - 1
    inside = number >= columns.n_before_step
    turns, number = turns[inside], number[inside]
    born = turns > 0
    times = np.where(born, as_ints(columns.seen_ns)[number], as_ints(columns.died_ns)[number])
    assert (as_ints(columns.died_ns)[number[~born]] != NONE).all()
    n_bytes = np.where(born, 1, -1) * as_ints(columns.n_bytes)[number]
    return AllocatorLog(time_ns=times, pointer=number + 1, n_bytes=n_bytes)


def collectives_of(tracker: Tracker, log: Allocations) -> tuple[Collective, ...]:
    """The collectives of the step on the timeline `log`."""
    return tuple(
        Collective(
            kind=kind,
            n_bytes=n_bytes,
            n_ranks=n_ranks,
            block=tracker.fqns[block],
            phase=PHASES[phase],
            tick=max(0, bisect_right(log.time_ns, time_ns - tracker.begin_ns) - 1),
        )
        for kind, n_bytes, n_ranks, block, phase, time_ns in tracker.collectives
    )
