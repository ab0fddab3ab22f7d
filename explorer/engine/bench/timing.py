"""Time of steps without any recording, of each block in steps with light hooks, and of each operator.

Operator times price a rerun that keeps some results; the number of saved tensors prices its checkpoint. A separate step
reads two marks of the clock around every operator of the forward. A mark costs as much as a small operator, so this
step yields no other time. Its readings serve as shares of a block's time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from explorer.engine.bench.checkpoint_cost import CheckpointCost
from explorer.engine.bench.step import OnPhase, Trainee, ignore, run_step
from explorer.engine.device.device import Clock, ClockName
from explorer.engine.watch.scopes import BlockScopes, BlockWatch, Frame, Listener, around_backward, looking_at_saved
from explorer.record.allocations import Phase
from explorer.record.failure import Failure
from explorer.record.measurement import Samples, Times
from explorer.record.policy import KEEP_ALL, Policy

N_LOOKS = 2
"""Dispatches per operator: one in the forward and one in the rerun."""


@dataclass(frozen=True)
class BlockSamples:
    """Milliseconds of a block over the repeated steps, children included."""

    forward: Samples = Samples()
    recompute: Samples = Samples()
    operators: OperatorTimes | None = None
    """None: the block's operators were not timed one by one."""


@dataclass
class Timed:
    """Readings of one run, one for each repeated step."""

    steps: list[dict[str, float]] = field(default_factory=list)
    blocks: list[dict[tuple[str, bool], float]] = field(default_factory=list)
    operators: Mapping[str, OperatorTimes] = field(default_factory=dict)
    checkpoint: CheckpointCost | None = None
    looked_at: list[float] = field(default_factory=list)
    """Forward milliseconds with every operator dispatched, one after each of the first steps."""
    failure: Failure | None = None

    @property
    def kept_operator_ms(self) -> float | None:
        """Extra milliseconds of an operator in forward and rerun, from forwards timed in turns; None without times."""
        more = [looked_at - step["forward"] for looked_at, step in zip(self.looked_at, self.steps)]
        n_operators = self.operators[""].n_calls if "" in self.operators else 0
        return N_LOOKS * max(0.0, median(more)) / n_operators if more and n_operators else None

    def times(self, clock: ClockName) -> Times | None:
        if not self.steps:
            return None
        cost, by_phase = self.checkpoint, defaultdict[str, list[float]](list)
        for step in self.steps:
            for phase, ms in step.items():
                by_phase[phase].append(ms)
        return Times(
            clock=clock,
            checkpoint_ms=cost.call_ms if cost else None,
            close_checkpoint_ms=cost.close_call_ms if cost else None,
            saved_tensor_ms=cost.saved_tensor_ms if cost else None,
            kept_operator_ms=self.kept_operator_ms,
            **{name: Samples(ms=tuple(by_phase[name])) for name in ("step", "forward", "backward", "optimizer")},
        )

    def block_samples(self) -> dict[str, BlockSamples]:
        readings: dict[tuple[str, bool], list[float]] = defaultdict(list)
        for step in self.blocks:
            for key, ms in step.items():
                readings[key].append(ms)
        return {
            fqn: BlockSamples(
                forward=Samples(ms=tuple(readings.get((fqn, False), ()))),
                recompute=Samples(ms=tuple(readings.get((fqn, True), ()))),
                operators=self.operators.get(fqn),
            )
            for fqn in {fqn for fqn, _ in readings}
        }


def step_ms(trainee: Trainee, clock: Clock, told: OnPhase = ignore) -> dict[str, float]:
    """Milliseconds of one step by phase, and of the whole as `step`. `told` is called at the begin of each phase."""
    marks: list[tuple[str, Any]] = []

    def on_phase(phase: Phase) -> None:
        marks.append((phase, clock.mark()))
        told(phase)

    clock.settle()
    run_step(trainee, on_phase)
    marks.append(("end", clock.mark()))
    clock.settle()
    took: dict[str, float] = defaultdict(float)
    for (phase, first), (_, last) in zip(marks, marks[1:]):
        took[phase] += clock.between_ms(first, last)
    took["step"] = clock.between_ms(marks[0][1], marks[-1][1])
    return dict(took)


def block_ms(trainee: Trainee, policy: Policy, clock: Clock) -> dict[tuple[str, bool], float]:
    """Milliseconds of one step by (fqn, runs again). A block's time includes its children.

    The time of a rerun is also charged to the block's ancestors, although the ancestors do not rerun.
    """
    return _block_ms(trainee.model, partial(run_step, trainee), policy, clock)


def live_step_ms(model: nn.Module, step: Callable[[], object], clock: Clock) -> dict[str, float]:
    """Milliseconds of one step of a user's loop: `step`, `forward` (the model's calls) and `backward`."""
    spans: list[tuple[str, Any, Any]] = []
    begun: list[Any] = []

    def begins(*_: Any) -> None:
        begun.append(clock.mark())

    def ends(name: str) -> Callable[..., None]:
        return lambda *_: spans.append((name, begun.pop(), clock.mark()))

    hooks = [model.register_forward_pre_hook(begins), model.register_forward_hook(ends("forward"), always_call=True)]
    clock.settle()
    try:
        with around_backward(begins, ends("backward")):
            begins()
            step()
            ends("step")()
    finally:
        for hook in hooks:
            hook.remove()
    clock.settle()
    took: dict[str, float] = defaultdict(float)
    for name, first, last in spans:
        took[name] += clock.between_ms(first, last)
    return dict(took)


def live_block_ms(model: nn.Module, step: Callable[[], object], clock: Clock) -> dict[tuple[str, bool], float]:
    """Milliseconds of one step of a user's loop with everything kept, by (fqn, runs again)."""

    def announcing(on_phase: OnPhase) -> None:
        with around_backward(lambda: on_phase("backward"), lambda: on_phase("between")):
            step()

    return _block_ms(model, announcing, KEEP_ALL, clock)


def _block_ms(
    model: nn.Module, step: Callable[[OnPhase], object], policy: Policy, clock: Clock
) -> dict[tuple[str, bool], float]:
    watch = _BlockWatch(clock)
    segments = [unit.blocks[0] for unit in policy.units if len(unit.blocks) > 1]
    scopes = BlockScopes(model, watch, segments=segments, new_frame=_Open)
    clock.settle()
    with scopes:
        step(watch.on_phase)
    clock.settle()
    took: dict[tuple[str, bool], float] = defaultdict(float)
    for block, again, outermost, first, last in watch.spans:
        ms = clock.between_ms(first, last)
        fqn = scopes.fqns[block]
        took[fqn, again] += ms
        while again and outermost and fqn:
            fqn = fqn.rpartition(".")[0]
            took[fqn, again] += ms
    return dict(took)


class _Open(Frame):
    def __init__(self) -> None:
        super().__init__()
        self.entered: list[tuple[int, bool, Any]] = []
        """(block, runs again, mark) of each block that is running."""


class _BlockWatch(Listener):
    """Times the blocks of one step."""

    def __init__(self, clock: Clock) -> None:
        self.spans: list[tuple[int, bool, bool, Any, Any]] = []
        """(block, runs again, outermost, first mark, last mark)"""
        self._clock = clock
        self._phase: Phase = "forward"

    def entered(self, block: int, frame: Any, inputs: Any) -> None:
        again = bool(frame.reruns) or self._phase == "backward"
        frame.entered.append((block, again, self._clock.mark()))

    def left(self, block: int, frame: Any, output: Any) -> None:
        entered, again, first = frame.entered.pop()
        self.spans.append((entered, again, not frame.entered, first, self._clock.mark()))

    def on_phase(self, phase: Phase) -> None:
        self._phase = phase


@dataclass(slots=True)
class OperatorTimes:
    """Operators and saved tensors of one block's forward calls, children included."""

    ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Milliseconds by operator, such as `aten.mm.default`."""
    n_calls: int = 0
    n_saved: int = 0
    """Tensors saved by autograd, parameters and repeated tensors included."""


def operator_times(trainee: Trainee, clock: Clock) -> Mapping[str, OperatorTimes]:
    """Operator times by block name, from one step that keeps everything."""
    return _operator_times(trainee.model, partial(run_step, trainee), clock)


def live_operator_times(model: nn.Module, step: Callable[[], object], clock: Clock) -> Mapping[str, OperatorTimes]:
    """Operator times of one step of a user's loop, by block name."""

    def announcing(on_phase: OnPhase) -> None:
        with around_backward(lambda: on_phase("backward"), lambda: on_phase("between")):
            step()

    return _operator_times(model, announcing, clock)


def _operator_times(model: nn.Module, step: Callable[[OnPhase], object], clock: Clock) -> Mapping[str, OperatorTimes]:
    watch = _OperatorWatch(model, clock)
    clock.settle()
    with looking_at_saved(watch.saved), watch:
        step(watch.on_phase)
    clock.settle()
    fqns = watch.scopes.fqns
    times = {fqn: OperatorTimes() for fqn in fqns}
    for running, name, first, last in watch.spans:
        ms = clock.between_ms(first, last)
        for block in running:
            of_block = times[fqns[block]]
            of_block.ms[name] += ms
            of_block.n_calls += 1
    for block, n_saved in watch.n_saved.items():
        times[fqns[block]].n_saved = n_saved
    return times


class _OperatorWatch(BlockWatch):
    """Times the operators and counts the saved tensors of one step."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        super().__init__(model)
        self.spans: list[tuple[frozenset[int], str, Any, Any]] = []
        """(blocks that are running, operator, first mark, last mark)"""
        self.n_saved: Counter[int] = Counter()
        self._clock = clock
        self._phase: Phase = "forward"
        self._running: frozenset[int] = frozenset()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._phase == "backward" or not self._running:
            return func(*args, **(kwargs or {}))
        first = self._clock.mark()
        out = func(*args, **(kwargs or {}))
        self.spans.append((self._running, str(func), first, self._clock.mark()))
        return out

    def saved(self, _: Tensor) -> None:
        self.n_saved.update(self._running)

    def entered(self, block: int, frame: Any, inputs: Any) -> None:
        self._running = frozenset(frame.stack[1:])

    def left(self, block: int, frame: Any, output: Any) -> None:
        self._running = frozenset(frame.stack[1:])

    def on_phase(self, phase: Phase) -> None:
        self._phase = phase


def dispatched_forward_ms(trainee: Trainee, clock: Clock) -> float:
    """Milliseconds of one step's forward with every operator dispatched and no result kept."""
    look = ExitStack()

    def on_phase(phase: Phase) -> None:
        look.close()
        if phase == "forward":
            look.enter_context(create_selective_checkpoint_contexts([])[0])

    with look:
        return step_ms(trainee, clock, on_phase)["forward"]
