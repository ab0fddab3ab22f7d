"""The bench: one step of one model on one device, taken and timed without any recording.

A step is a callable that announces its phases. The steps of a RunSpec and of a user's loop are two such callables, so
both are warmed and timed by the same functions. recording.py records them.

    time             the whole step                                by phase
    time_blocks      the step with light hooks                     by phase and by block
    time_operators   forwards with marks around every operator     shares of a block's time, counts of saved tensors
    time_dispatched  forwards with torch's selective dispatch      cost of keeping operators' results (save_ops)

Operator times price a rerun that keeps some results; the number of saved tensors prices its checkpoint. A mark costs as
much as a small operator, so `time_operators` yields no other time.

`checkpoint_cost` times torch.utils.checkpoint beside the second forward, on modules of few or many cheap operators. A
model's tensors sweep the CPU caches that hold this Python code. A call took 0.09 ms between modules without a sweep,
and 0.6 ms around blocks of the sample models. A saved tensor took 0.01 ms in both. The measurement therefore sweeps
the caches between calls and subtracts the time of the sweeps. After 16 MiB a call takes 0.2 ms; after 48 MiB and more
0.48 ms, on a CPU whose cores share 32 MiB.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from explorer.engine.bench.memory import memory_limit
from explorer.engine.bench.step import OnPhase, Trainee, forwards, ignore, run_step, segment_heads
from explorer.engine.device.device import Clock, ClockName, Device, device_of
from explorer.engine.policy.apply import apply_policy
from explorer.engine.watch.scopes import BlockScopes, BlockWatch, Frame, Listener, looking_at_saved
from explorer.record.allocations import Phase
from explorer.record.failure import Failure
from explorer.record.measurement import Measurement, Samples, Times
from explorer.record.policy import KEEP_ALL, Policy

Step = Callable[[OnPhase], object]
"""A training step. It calls its argument at the begin of each phase."""
BlockTimes = dict[tuple[str, bool], float]
"""Milliseconds by (block, runs again)."""


@dataclass(frozen=True)
class Bench:
    """A step of `model` on a device with its clock; `limit` is the context of an untimed step.

    `forwards` are the forwards of a step alone; None if the step does not say how to run them.
    """

    model: nn.Module
    step: Step
    clock: Clock
    limit: Callable[[], AbstractContextManager[None]] = nullcontext
    forwards: Step | None = None

    def take(self) -> Any:
        """Takes one step within the memory limit and returns the step's result."""
        with self.limit():
            return self.step(ignore)

    def time(self, on_phase: OnPhase = ignore, step: Step | None = None) -> dict[str, float]:
        """Milliseconds of one step by phase, and of the whole as `step`."""
        clock = self.clock
        marks: list[tuple[str, object]] = []

        def mark(phase: Phase) -> None:
            marks.append((phase, clock.mark()))
            on_phase(phase)

        clock.settle()
        (step or self.step)(mark)
        marks.append(("end", clock.mark()))
        clock.settle()
        times: dict[str, float] = defaultdict(float)
        for (phase, first), (_, last) in zip(marks, marks[1:]):
            times[phase] += clock.between_ms(first, last)
        times["step"] = clock.between_ms(marks[0][1], marks[-1][1])
        return dict(times)

    def time_blocks(self, policy: Policy) -> tuple[dict[str, float], BlockTimes]:
        """Milliseconds of one step as `time` returns them, and by (block, runs again) with a block's children.

        The time of a rerun is also charged to the block's ancestors, although the ancestors do not rerun.
        """
        watch = _BlockWatch(self.clock)
        scopes = BlockScopes(self.model, watch, segments=segment_heads(policy), new_frame=_BlockFrame)
        with scopes:
            phases = self.time(watch.on_phase)
        times: BlockTimes = defaultdict(float)
        for block, again, outermost, first, last in watch.spans:
            ms = self.clock.between_ms(first, last)
            fqn = scopes.fqns[block]
            times[fqn, again] += ms
            while again and outermost and fqn:
                fqn = fqn.rpartition(".")[0]
                times[fqn, again] += ms
        return phases, dict(times)

    def time_operators(self) -> Mapping[str, OperatorTimes]:
        """Operators and saved tensors of the forward by block, from one step that keeps everything."""
        watch = _OperatorWatch(self.model, self.clock)
        fqns = watch.scopes.fqns
        self.clock.settle()
        with looking_at_saved(watch.saved), watch:
            (self.forwards or self.step)(watch.on_phase)
        self.clock.settle()
        times = {fqn: OperatorTimes() for fqn in fqns}
        for running, operator, first, last in watch.spans:
            ms = self.clock.between_ms(first, last)
            for block in running:
                of_block = times[fqns[block]]
                of_block.ms[operator] += ms
                of_block.n_calls += 1
        for block, n_saved in watch.n_saved.items():
            times[fqns[block]].n_saved = n_saved
        return times

    def time_dispatched(self) -> float:
        """Milliseconds of one step's forward with every operator dispatched and no result kept.

        A loop of small operators shows 15 microseconds for each dispatch. Between real operators, which displace Python
        from the caches, a dispatch took 50 to 130 (four samples, torch 2.13, a CPU core). A busy GPU does not wait for
        the dispatch. A rerun dispatches as often as a forward.
        Source: torch.utils.checkpoint.create_selective_checkpoint_contexts
        """
        dispatch = ExitStack()

        def on_phase(phase: Phase) -> None:
            dispatch.close()
            if phase == "forward":
                dispatch.enter_context(create_selective_checkpoint_contexts([])[0])

        with dispatch:
            return self.time(on_phase, self.forwards)["forward"]


def bench_of(trainee: Trainee, device: Device) -> Bench:
    """The bench of a RunSpec's step, within the memory limit of the spec."""
    limit = partial(memory_limit, device, trainee)
    return Bench(trainee.model, partial(run_step, trainee), device.clock(), limit, partial(forwards, trainee))


@dataclass(slots=True)
class OperatorTimes:
    """Operators and saved tensors of one block's forward calls, children included."""

    ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Milliseconds by operator, such as `aten.mm.default`."""
    n_calls: int = 0
    n_saved: int = 0
    """Tensors saved by autograd, parameters and repeated tensors included."""


@dataclass
class Readings:
    """Readings of one run, one for each repeated step."""

    steps: list[dict[str, float]] = field(default_factory=list)
    blocks: list[BlockTimes] = field(default_factory=list)
    operators: Mapping[str, OperatorTimes] = field(default_factory=dict)
    checkpoint: CheckpointCost | None = None
    dispatched: list[tuple[float, float]] = field(default_factory=list)
    """Milliseconds of a forward with every operator dispatched, and of a plain forward after it."""
    failure: Failure | None = None

    @property
    def kept_operator_ms(self) -> float | None:
        """Extra milliseconds of an operator in forward and rerun, from forwards timed in turns; None without times."""
        extra = [dispatched - plain for dispatched, plain in self.dispatched]
        n_operators = self.operators[""].n_calls if "" in self.operators else 0
        if not extra or not n_operators:
            return None
        return 2 * max(0.0, median(extra)) / n_operators  # one dispatch in the forward and one in the rerun

    def times(self, clock: ClockName) -> Times | None:
        """Times of the step; None without a reading."""
        if not self.steps:
            return None
        phases = ("step", "forward", "backward", "optimizer")
        samples = {name: Samples(ms=tuple(step[name] for step in self.steps if name in step)) for name in phases}
        checkpoint = self.checkpoint._asdict() if self.checkpoint else {}
        return replace(Times(clock=clock), kept_operator_ms=self.kept_operator_ms, **samples, **checkpoint)

    def added_to(self, run: Measurement, clock: ClockName) -> Measurement:
        """`run` with the times of its step and of its blocks."""
        blocks = []
        for cost in run.blocks:
            forward, recompute = self._samples(cost.fqn, again=False), self._samples(cost.fqn, again=True)
            operators = self.operators.get(cost.fqn) if forward.ms or recompute.ms else None
            cost = replace(cost, forward=forward, recompute=recompute)
            if operators is not None:
                times, n_operators, n_saved = dict(operators.ms), operators.n_calls, operators.n_saved
                cost = replace(cost, operator_ms=times, n_operators=n_operators, n_saved=n_saved)
            blocks.append(cost)
        return replace(run, times=self.times(clock), blocks=tuple(blocks))

    def _samples(self, fqn: str, *, again: bool) -> Samples:
        return Samples(ms=tuple(times[fqn, again] for times in self.blocks if (fqn, again) in times))


@dataclass(frozen=True)
class BegunSteps:
    """A model without a policy after its first steps, and readings of the steps taken so far, by run."""

    trainee: Trainee
    times: Sequence[Sequence[dict[str, float]]]
    peaks: Sequence[int | None]
    """Peak of a step of each run, seen by the allocator alone."""


class CheckpointCost(NamedTuple):
    """Milliseconds of torch.utils.checkpoint beside the second forward, see `record.measurement.Times`."""

    checkpoint_ms: float
    """A call after a model has swept the caches since the last call."""
    close_checkpoint_ms: float
    """A call directly after another call."""
    saved_tensor_ms: float
    """Extra time for each tensor saved in the call."""


N_MODULES = 3
FEW, MANY = 2, 14
"""Operators of a module. Each operator saves one tensor."""
N_ROUNDS = 9
"""Readings, reduced to their median: a call takes tenths of a millisecond."""
SWEPT_BYTES = 2**26
"""Twice what the cores of an EPYC share."""


def warm_checkpoint(device: torch.device) -> None:
    """Calls torch.utils.checkpoint once: the first call imports torch._dynamo (seconds), at no policy's charge."""
    value = torch.ones(1, device=device, requires_grad=True)
    checkpoint(torch.exp, value, use_reentrant=False).sum().backward()


@cache
def checkpoint_cost(device: torch.device) -> CheckpointCost:
    """The cost on this machine by the step's clock, read once per process in a third of a second."""
    return read_cost(device, device_of(device).clock())


def read_cost(device: torch.device, clock: Clock) -> CheckpointCost:
    """The cost from medians of N_ROUNDS readings, each figure at least 0. No random number is drawn."""
    value = torch.ones(64, device=device, requires_grad=True)
    few_ms, many_ms = (_call_ms(n_operators, value, clock, None) for n_operators in (FEW, MANY))
    cold_ms = _call_ms(FEW, value, clock, _Sweep(clock)) if device.type == "cpu" else few_ms
    saved_tensor_ms = max(0.0, (many_ms - few_ms) / (MANY - FEW))
    call_ms, close_call_ms = (max(0.0, ms - FEW * saved_tensor_ms) for ms in (cold_ms, few_ms))
    return CheckpointCost(call_ms, close_call_ms, saved_tensor_ms)


def _call_ms(n_operators: int, value: Tensor, clock: Clock, sweep: _Sweep | None) -> float:
    """Median time of a checkpointed call of `n_operators` beyond a kept call and a forward."""
    modules = nn.ModuleList(_Sines(n_operators) for _ in range(N_MODULES))
    recomputed = Policy.recompute(str(i) for i in range(N_MODULES))

    def step_ms(policy: Policy) -> tuple[float, float]:
        """Milliseconds of forward and backward together without sweeps, and of the modules' forward alone."""
        result, spans = value, []
        with apply_policy(modules, policy):
            clock.settle()
            first = clock.mark()
            for module in modules:
                if sweep is not None:
                    sweep()
                begun = clock.mark()
                result = module(result)
                spans.append((begun, clock.mark()))
                if sweep is not None:
                    result.register_hook(sweep)
            result.sum().backward()
            last = clock.mark()
            clock.settle()
        swept_ms = 0.0 if sweep is None else sweep.taken_ms()
        return clock.between_ms(first, last) - swept_ms, sum(clock.between_ms(*span) for span in spans)

    def call_ms() -> float:
        (kept_ms, forward_ms), (again_ms, _) = step_ms(KEEP_ALL), step_ms(recomputed)
        return (again_ms - kept_ms - forward_ms) / N_MODULES

    return median(call_ms() for _ in range(N_ROUNDS))


class _Sines(nn.Module):
    """Cheap operators that save their input, so that every operator runs again."""

    def __init__(self, n_operators: int) -> None:
        super().__init__()
        self._n_operators = n_operators

    def forward(self, value: Tensor) -> Tensor:
        for _ in range(self._n_operators):
            value = value.sin()
        return value


class _Sweep:
    """Reads enough memory to displace the CPU caches, and times the reads. No operator of torch runs."""

    def __init__(self, clock: Clock) -> None:
        self._memory = bytearray(b"\x01") * SWEPT_BYTES  # never written, all of it would be one page of zeros
        self._clock = clock
        self._spans: list[tuple[object, object]] = []

    def __call__(self, _: Tensor | None = None) -> None:
        begun = self._clock.mark()
        self._memory.find(0)
        self._spans.append((begun, self._clock.mark()))

    def taken_ms(self) -> float:
        """Milliseconds of sweeps since the last call of this function."""
        spans, self._spans = self._spans, []
        return sum(self._clock.between_ms(*span) for span in spans)


class _BlockFrame(Frame):
    def __init__(self) -> None:
        super().__init__()
        self.entered: list[tuple[int, bool, object]] = []
        """(block, runs again, mark) of each block that is running."""


class _BlockWatch(Listener):
    """Times the blocks of one step."""

    def __init__(self, clock: Clock) -> None:
        self.spans: list[tuple[int, bool, bool, object, object]] = []
        """(block, runs again, outermost, first mark, last mark)"""
        self._clock = clock
        self._phase: Phase = "forward"

    def entered(self, block: int, frame: Any, inputs: object) -> None:
        again = bool(frame.reruns) or self._phase == "backward"
        frame.entered.append((block, again, self._clock.mark()))

    def left(self, block: int, frame: Any, output: object) -> None:
        entered, again, first = frame.entered.pop()
        self.spans.append((entered, again, not frame.entered, first, self._clock.mark()))

    def on_phase(self, phase: Phase) -> None:
        self._phase = phase


class _OperatorWatch(BlockWatch):
    """Times the operators and counts the saved tensors of one step."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        super().__init__(model)
        self.spans: list[tuple[frozenset[int], str, object, object]] = []
        """(blocks that are running, operator, first mark, last mark)"""
        self.n_saved: Counter[int] = Counter()
        self._clock = clock
        self._phase: Phase = "forward"
        self._running: frozenset[int] = frozenset()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if self._phase == "backward" or not self._running:
            return func(*args, **(kwargs or {}))
        first = self._clock.mark()
        out = func(*args, **(kwargs or {}))
        self.spans.append((self._running, str(func), first, self._clock.mark()))
        return out

    def saved(self, _: Tensor) -> None:
        self.n_saved.update(self._running)

    def entered(self, block: int, frame: Any, inputs: object) -> None:
        self._running = frozenset(frame.stack[1:])

    def left(self, block: int, frame: Any, output: object) -> None:
        self._running = frozenset(frame.stack[1:])

    def on_phase(self, phase: Phase) -> None:
        self._phase = phase
