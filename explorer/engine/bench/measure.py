"""The ways to measure the step of a RunSpec: alone, in a pair, the first that fits, without data.

Two instruments and a clock watch the step. The clock never runs together with the instruments.

warm up        a checkpoint (its first call imports torch._dynamo), then a step under the tracker
record         one step, allocator and tracker together      timeline, phases, FLOPs, cost per block
record alone   one step, allocator only                      does watching change the step?
               a comparison judges this step                 with the optimizer's state that the step makes at its end
time           n steps, the last two with light hooks        by phase and by block, in turns if two runs are compared
price          one forward, each operator by itself          shares of a block's time
               3 forwards with every operator dispatched     time of keeping operators' results (save_ops)
               a few small modules, kept and recomputed      time of a checkpoint beside its second forward

The price is what only forecasts need: `measure` reads it, a pair does without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from msgspec.structs import replace

from explorer.engine.bench.attribution import watch_releases, with_releases
from explorer.engine.bench.bench import BegunSteps, Bench, Readings, bench_of, checkpoint_cost, warm_checkpoint
from explorer.engine.bench.recording import (
    FurtherSteps,
    Recording,
    is_near,
    record,
    recording_of,
    tracker_of,
    with_peak_alone,
)
from explorer.engine.bench.step import (
    OnPhase,
    Trainee,
    ignore,
    prepare,
    refuse_other_settings,
    step_without_loss,
    torch_device,
    trainee_of,
)
from explorer.engine.device.cuda_rules import cuda_rules
from explorer.engine.device.device import device_of
from explorer.engine.device.memory_limit import failure_in_step, without_page_faults
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.engine.device.without_data import CPU_AUTOCAST, LEFT_OUT, ON_THE_CPU, cast_buffers, without_data
from explorer.engine.imaginary.seen import sees_imaginary_card
from explorer.engine.model.conditions import torch_dtype
from explorer.engine.model.describe import describe, describe_copy, graph_of_conditions
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded, blaming, cast_type
from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.global_state import preserve_global_state
from explorer.engine.state.rng import RngState, seed_everything
from explorer.engine.watch.checkpoint_calls import lost_gradients_refused
from explorer.engine.watch.real_bytes import RealBytes
from explorer.errors import BadInput, ExplorerError, OutOfMemory, message_of
from explorer.plan.card.allocator_options import OTHER_OPTIONS
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.card.torch_rules import torch_of
from explorer.plan.policy.presets import ladder
from explorer.record.base import Record, to_msgpack
from explorer.record.failure import is_out_of_memory
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement, Refused
from explorer.record.plan import Progress, Report, silent
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import RunSpec

N_RECORDED = 3
"""Steps of a recorded run, see `recording.record`."""
N_BLOCK_ROUNDS = 2
"""Steps that time the blocks."""
N_DISPATCHED = 3
"""Forwards with every operator dispatched, each beside a plain forward."""
HOOK_MS = 0.01
"""Cost of the hooks for one call of a block, from above: a loop of empty modules showed 5 microseconds."""
HOOKS_SHARE = 0.01
"""Share of a step that the hooks of its blocks may cost if the step's time is to count."""


class Meter:
    """Counts `total` steps of a job and reports each at its begin."""

    def __init__(self, report: Report, total: int) -> None:
        self._report, self._total, self._done, self._part = report, total, 0, b""

    def __call__(self, what: str) -> None:
        done = min(self._done, self._total)
        self._report(Progress(what=what, done=done, total=self._total, part=self._part))
        self._done, self._part = self._done + 1, b""

    def more(self, n_steps: int) -> None:
        """Adds steps that were not expected to the total."""
        self._total += n_steps

    def part(self, result: Record) -> None:
        """The next report carries `result`, the job's result as far as it is complete."""
        self._part = to_msgpack(result)


def measure(spec: RunSpec, report: Report = silent) -> Measurement:
    """The run of `spec`. Errors of the model and lack of memory become `failure`; errors of load and prepare pass.

    Bytes come from the allocator, FLOPs and calls are counted, times come from steps without any recording.
    """
    return _measure((spec,), report, priced=True)[0]


def measure_and_describe(spec: RunSpec, report: Report = silent) -> Measurement:
    """As `measure`, with the model's graph, which comes first as a part."""
    return _measure((spec,), report, priced=True, graph=True)[0]


def measure_pair(baseline: RunSpec, candidate: RunSpec, report: Report = silent) -> tuple[Measurement, Measurement]:
    """Both runs from identical state, timed in turns (A, B, A, B). Raises BadInput if other settings differ."""
    refuse_other_settings(baseline, candidate)
    first, second = _measure((baseline, candidate), report, priced=False)
    return first, second


def measure_beside_keep_all(spec: RunSpec, report: Report = silent) -> Measurement:
    """The run of `spec`, timed in turns with steps that keep everything."""
    baseline, run = measure_pair(replace(spec, policy=KEEP_ALL), spec, report)
    if baseline.times is None or run.times is None:
        return run
    return replace(run, times=replace(run.times, beside=baseline.times.step))


def measure_what_fits(spec: RunSpec, report: Report = silent, *, with_graph: bool = False) -> Measurement:
    """The run of `spec`, or the first policy of the ladder that fits if `spec` is out of memory.

    `refused` lists the earlier runs, beginning with `spec`: the least held bytes and the place of the refusal. The
    baseline is composed from the run that fits. Each attempt has its process: a process does not return all memory.
    `with_graph`: as `measure_and_describe`. If no policy fits, the last attempt is returned with its failure. Raises
    the errors of load and prepare, OutOfMemory if the system ended even the last attempt.
    """
    refused: list[Refused] = []
    function, graph = measure_and_describe if with_graph else measure, None
    for name, policy in _attempts(spec):
        prefix = f"{refused[-1].what} does not fit, now {name}: " if refused else ""

        def prefixed(progress: Progress, prefix: str = prefix) -> None:
            report(replace(progress, what=prefix + progress.what))

        attempt, what = replace(spec, policy=policy), f"measured {spec.model.target}"
        run = call_in_subprocess(function, attempt, report=prefixed, what=what)
        if run is not None and run.graph is not None:
            function, graph = measure, run.graph
        if run is not None and (run.failure is None or run.failure.kind != "out of memory"):
            return replace(run, refused=tuple(refused), graph=graph)
        held_peak_bytes, where = (None, "") if run is None else (run.held_peak_bytes, run.failed_in)
        refused.append(Refused(what=name, policy=policy, held_peak_bytes=held_peak_bytes, failed_in=where))
    if run is None:
        raise OutOfMemory(
            f"The system ended the step for lack of memory, with {name} too.",
            hint="Take a smaller size or batch, or split the batch into microbatches.",
        )
    return replace(run, refused=tuple(refused[:-1]), graph=graph)


def _attempts(spec: RunSpec) -> Iterator[tuple[str, Policy]]:
    yield "the policy" if spec.policy.units else "everything kept", spec.policy
    for name, policy in ladder(describe(spec.model, seed=spec.seed, conditions=spec.conditions)):
        yield f"{name} recomputed", policy


def _measure(specs: Sequence[RunSpec], report: Report, *, priced: bool, graph: bool = False) -> tuple[Measurement, ...]:
    meter = Meter(report, 1 + 2 * graph + n_reports(specs))
    with preserve_global_state():
        meter("loading the model")
        session = Session(specs, load_for(specs[0]), meter)
        if graph:
            session.describe()
        session.record(meter.part if priced else lambda run: None)
        with without_page_faults():
            session.time()
            if priced:
                meter.part(session.runs[0])
                session.price()
    return session.runs


def n_timed(spec: RunSpec) -> int:
    """Steps of `spec` that are timed: none on an imaginary card."""
    return 0 if sees_imaginary_card(spec.device) else spec.n_repeats


def n_reports(specs: Sequence[RunSpec]) -> int:
    """Steps that a session of `specs` reports, if it warms the clock."""
    n_repeats = n_timed(specs[0])
    return len(specs) * (N_RECORDED + n_repeats) + bool(n_repeats)


class Session:
    """Runs of one model under several policies: each is recorded, then all are timed in turns on one copy."""

    def __init__(self, specs: Sequence[RunSpec], loaded: Loaded, meter: Meter) -> None:
        self._specs, self._loaded, self._meter = specs, loaded, meter
        self._n_repeats = n_timed(specs[0])
        self._device = device_of(torch_device(specs[0]))
        self._recorded: list[Measurement] = []
        self._readings: list[Readings] = []
        self._bench: Bench | None = None
        self._graph: ModelGraph | None = None

    @property
    def runs(self) -> tuple[Measurement, ...]:
        """The runs as far as they are measured."""
        clock, free_bytes = self._device.clock().name, self._device.free_bytes()
        return tuple(
            replace(readings.added_to(run, clock), failure=readings.failure, free_memory_bytes=free_bytes)
            for run, readings in zip(self._recorded, self._readings)
        )

    def describe(self) -> None:
        """Observes one forward of a copy, as the model must not run before its steps. Raises ModelFailed."""
        self._meter("watching one forward")
        spec = self._specs[0]
        self._graph = describe_copy(self._loaded, lambda: load_for(spec), spec.device, spec.conditions)
        where = self._device.environment(spec.n_threads)
        self._meter.part(Measurement(spec=spec, environment=where, graph=self._graph))
        self._meter("preparing the step")

    def record(
        self, recorded: Callable[[Measurement], None] = lambda run: None, further: FurtherSteps | None = None
    ) -> None:
        """Records each run; `recorded` gets a run as soon as it has its timeline. A failure is part of the result."""
        warm_checkpoint(self._device.torch)
        self._graph = self._graph or graph_of_conditions(self._specs[0], self._loaded)
        names = ("baseline: ", "candidate: ") if len(self._specs) > 1 else ("",)
        further = further or FurtherSteps()
        for spec, name in zip(self._specs, names):

            def meter(what: str, name: str = name) -> None:
                self._meter(name + what)

            run = record(spec, self._loaded, meter, recorded, further)
            self._recorded.append(replace(run, graph=self._graph))
            self._readings.append(Readings(failure=run.failure))

    def time(self, begun: BegunSteps | None = None) -> None:
        """Times all complete runs in turns on one model: memory holds one model, and a slow minute affects all alike.
        If steps have `begun`, the model of run 0 goes on; else a copy takes a step to warm up.

        The last steps also time the blocks if their hooks cost less than HOOKS_SHARE of the step; else the blocks are
        timed in steps of their own.
        """
        if begun is not None:
            self._go_on(begun)
        complete = [i for i, readings in enumerate(self._readings) if readings.failure is None]
        if not complete or not self._n_repeats:
            return
        try:
            if begun is None:
                self._warm(max(complete, key=lambda i: self._recorded[i].held_peak_bytes or 0))
            self._time(complete)
        except RuntimeError as error:  # a GPU that a failed run has left unusable: earlier recordings stand
            if len(complete) == len(self._specs):
                raise
            text = f"Nothing was timed: the failure left the device unusable ({message_of(error)})."
            self._recorded = [replace(run, warnings=(*run.warnings, text)) for run in self._recorded]

    def _go_on(self, begun: BegunSteps) -> None:
        """Adds the steps' readings and the allocator's peaks. A peak far from the recorded one is read again."""
        self._bench, n_repeats = bench_of(begun.trainee, self._device), self._n_repeats
        for readings, times in zip(self._readings, begun.times):
            readings.steps += times[: n_repeats and max(1, n_repeats - N_BLOCK_ROUNDS)]
        for i, (run, peak) in enumerate(zip(self._recorded, begun.peaks)):
            if run.peaks.alone_peak_bytes is None and peak is not None and is_near(run, peak):
                self._recorded[i] = replace(run, peaks=replace(run.peaks, alone_peak_bytes=peak))
            elif run.peaks.alone_peak_bytes is None:
                self._under_policy(i, partial(self._read_peak, i, begun.trainee))

    def _read_peak(self, i: int, trainee: Trainee, bench: Bench) -> None:
        seed_everything(self._specs[i].seed)
        self._recorded[i] = with_peak_alone(self._recorded[i], trainee, RngState.capture(trainee.model))

    def _warm(self, i: int) -> None:
        """Takes one step of run `i`: the first step makes the optimizer's state, and its memory serves all runs."""
        trainee = prepare(self._specs[i], self._loaded)
        trainee.handle.undo()
        self._bench = bench_of(trainee, self._device)
        self._meter("warming up the clock")
        self._under_policy(i, lambda bench: bench.step(ignore))

    def _time(self, runs: Sequence[int]) -> None:
        n_repeats, rides = self._n_repeats, False
        for round_ in range(n_repeats):
            if round_ == n_repeats - N_BLOCK_ROUNDS:
                rides = round_ > 0 and all(map(self._hooks_are_cheap, runs))
            for i in runs:
                self._meter(f"timing step {round_ + 1} of {n_repeats}")
                if len(self._readings[i].steps) <= round_:  # else timed before
                    self._under_policy(i, partial(self._read, i, step=True, blocks=rides))
        n_rounds = 0 if rides else min(N_BLOCK_ROUNDS, n_repeats)
        self._meter.more(n_rounds * len(runs))
        for round_ in range(n_rounds):
            for i in runs:
                self._meter(f"timing blocks, step {round_ + 1} of {n_rounds}")
                self._under_policy(i, partial(self._read, i, step=False, blocks=True))

    def _read(self, i: int, bench: Bench, *, step: bool, blocks: bool) -> None:
        """Times one step of run `i`. The step, its blocks or both get a reading."""
        readings = self._readings[i]
        times, by_block = bench.time_blocks(self._specs[i].policy) if blocks else (bench.time(), {})
        readings.steps += [times] if step else []
        readings.blocks += [by_block] if blocks else []

    def _hooks_are_cheap(self, i: int) -> bool:
        steps = self._readings[i].steps
        n_calls = sum(block.n_forward + block.n_recompute for block in self._recorded[i].blocks)
        return bool(steps) and n_calls * HOOK_MS <= HOOKS_SHARE * min(step["step"] for step in steps)

    def price(self) -> None:
        """Reads what only a forecast needs: operators, torch's look at them, checkpoints. Run 0 keeps everything."""
        readings = self._readings[0]
        if not readings.steps:
            return
        if not self._specs[0].policy.units:
            self._meter.more(1)
            self._meter("timing operators")
            self._under_policy(0, self._read_operators)
        readings.checkpoint = checkpoint_cost(self._device.torch)

    def _read_operators(self, bench: Bench) -> None:
        readings = self._readings[0]
        readings.dispatched = [
            (bench.time_dispatched(), bench.time(step=bench.forwards)["forward"]) for _ in range(N_DISPATCHED)
        ]
        readings.operators = bench.time_operators()

    def _under_policy(self, i: int, work: Callable[[Bench], object]) -> None:
        """Does `work` under the policy of run `i`, unless the run has failed. A failure of `work` is the run's."""
        spec, readings, bench = self._specs[i], self._readings[i], self._bench
        if readings.failure is not None or bench is None:
            return
        try:
            with apply_policy(bench.model, spec.policy), self._device.timed_memory_limit(spec.memory_limit_bytes):
                work(bench)
        except Exception as error:
            if isinstance(error, ExplorerError) and not is_out_of_memory(error):
                raise
            readings.failure = failure_in_step(error)


def measure_without_data(
    spec: RunSpec,
    report: Report = silent,
    step: Callable[[Trainee, OnPhase], object] = step_without_loss,
    *,
    figures_only: bool = False,
) -> Measurement:
    """The predicted memory of the step of `spec`, tick by tick, without memory for the parameters.

    No kernel runs. If the spec names a card, CUDA's rules are played, and the record says what the card holds.
    `step` may be another step, which may set the trainee's optimizer. `figures_only` leaves out other settings of the
    allocator, the graph, and of a policy the releases. Raises BadInput, ModelNotLoaded, ModelFailed.
    """
    if spec.device != "cpu":
        raise BadInput("A step without data is played on the CPU.", hint="Leave --device out.")
    device, meter = device_of(torch.device("cpu")), Meter(report, 3)

    def cast(dtype: torch.dtype) -> torch.dtype:
        return cast_type(dtype, torch_dtype(spec))

    def play() -> Recording:
        with recording_of(trainee, device, data=False) as recording:
            step(trainee, recording.tracker.on_phase)
        return recording

    rules = cuda_rules(spec.card.capability, torch_of(spec.card)) if spec.card is not None else nullcontext()
    with preserve_global_state(), without_data(cast), rules, RealBytes(spec.model.target):
        meter("building the model without data")
        warm_checkpoint(device.torch)
        loaded = load_for(spec)
        cast_buffers(loaded.model, cast)
        with blaming(spec.model, loaded.inputs, "step without data"), lost_gradients_refused():
            trainee, first = trainee_of(spec, loaded), None
            meter("playing a step")
            if step is step_without_loss:
                step(trainee, ignore)
            else:  # the step in which an optimizer of the caller makes its state
                first = play().measurement(spec)
            watched = None if figures_only and spec.policy.units else watch_releases(trainee, tracker_of(trainee))
            meter("playing the step under the tracker")
            recording = play()
        run = with_releases(recording.measurement(spec), watched)
        run = replace(run, batch=trainee.batch_text)
        if not figures_only:
            run = replace(run, graph=graph_of_conditions(spec))
    if spec.card is not None:
        memory = memory_on(spec.card, run, first, others=OTHER_OPTIONS * (not figures_only))
        return replace(run, origin="predicted", card=memory, warnings=(LEFT_OUT,))
    return replace(run, origin="predicted", warnings=(*ON_THE_CPU, *([CPU_AUTOCAST] * (spec.autocast != "none"))))
