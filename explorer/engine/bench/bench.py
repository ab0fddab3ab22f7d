"""The bench: one step of one model on one device, taken and timed without any recording.

A step is a callable that announces its phases. The steps of a RunSpec and of a user's loop are two such callables, so
both are warmed and timed by the same functions. recording.py records them.

    time             the whole step                                by phase
    time_blocks      the step with light hooks                     by phase and by block
    time_operators   forwards with marks around every operator     shares of a block's time, counts of saved tensors
    time_dispatched  forwards with torch's selective dispatch      cost of keeping operators' results (save_ops)

Operator times price a rerun that keeps some results; the number of saved tensors prices its checkpoint. A mark costs as
much as a small operator, so `time_operators` yields no other time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from explorer.engine.bench.checkpoint_cost import CheckpointCost
from explorer.engine.bench.memory import memory_limit
from explorer.engine.bench.step import OnPhase, Trainee, forwards, ignore, run_step, segment_heads
from explorer.engine.device.device import Clock, ClockName, Device
from explorer.engine.watch.scopes import BlockScopes, BlockWatch, Frame, Listener, looking_at_saved
from explorer.record.allocations import Phase
from explorer.record.failure import Failure
from explorer.record.measurement import Measurement, Samples, Times
from explorer.record.policy import Policy

Step = Callable[[OnPhase], object]
"""A training step. It calls its argument at the begin of each phase."""
BlockTimes = dict[tuple[str, bool], float]
"""Milliseconds by (block, runs again)."""

DISPATCHES_PER_OPERATOR = 2
"""One in the forward and one in the rerun."""


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

    def time_forward(self) -> float:
        """Milliseconds of the step's forwards."""
        return self.time(step=self.forwards)["forward"]

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
        return DISPATCHES_PER_OPERATOR * max(0.0, median(extra)) / n_operators

    def times(self, clock: ClockName) -> Times | None:
        """Times of the step; None without a reading."""
        if not self.steps:
            return None
        cost = self.checkpoint
        phases = ("step", "forward", "backward", "optimizer")
        return Times(
            clock=clock,
            checkpoint_ms=cost.call_ms if cost else None,
            close_checkpoint_ms=cost.close_call_ms if cost else None,
            saved_tensor_ms=cost.saved_tensor_ms if cost else None,
            kept_operator_ms=self.kept_operator_ms,
            **{name: Samples(ms=tuple(step[name] for step in self.steps if name in step)) for name in phases},
        )

    def added_to(self, run: Measurement, clock: ClockName) -> Measurement:
        """`run` with the times of its step and of its blocks."""
        blocks = []
        for cost in run.blocks:
            forward, recompute = self._samples(cost.fqn, again=False), self._samples(cost.fqn, again=True)
            operators = self.operators.get(cost.fqn) if forward.ms or recompute.ms else None
            cost = replace(cost, forward=forward, recompute=recompute)
            if operators is not None:
                counts = {"n_operators": operators.n_calls, "n_saved": operators.n_saved}
                cost = replace(cost, operator_ms=dict(operators.ms), **counts)
            blocks.append(cost)
        return replace(run, times=self.times(clock), blocks=tuple(blocks))

    def _samples(self, fqn: str, *, again: bool) -> Samples:
        return Samples(ms=tuple(times[fqn, again] for times in self.blocks if (fqn, again) in times))


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
