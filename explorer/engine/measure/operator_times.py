"""Time of each operator in each block's forward, and the number of tensors saved by each block.

The times price a rerun that keeps some results; the saved tensors price its checkpoint. A separate step reads two marks
of the clock around every operator of the forward. A mark costs as much as a small operator, so this step yields no
other time. Its readings serve as shares of a block's time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from explorer.engine.device.clocks import Clock
from explorer.engine.step import OnPhase, Trainee, run_step
from explorer.engine.watch.backward import around_backward
from explorer.engine.watch.saved import looking_at_saved
from explorer.engine.watch.scopes import BlockScopes
from explorer.engine.watch.uncompiled import DispatchMode
from explorer.record.allocations import Phase


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
    watch = _OperatorWatch(clock)
    clock.settle()
    with BlockScopes(model, watch) as scopes, looking_at_saved(watch.saved), watch:
        step(watch.on_phase)
    clock.settle()
    times = {fqn: OperatorTimes() for fqn in scopes.fqns}
    for running, name, first, last in watch.spans:
        ms = clock.between_ms(first, last)
        for block in running:
            of_block = times[scopes.fqns[block]]
            of_block.ms[name] += ms
            of_block.n_calls += 1
    for block, n_saved in watch.n_saved.items():
        times[scopes.fqns[block]].n_saved = n_saved
    return times


class _OperatorWatch(DispatchMode):
    """Times the operators and counts the saved tensors of one step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
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

    def rerun_changed(self, frame: Any) -> None:
        """No unit runs again."""

    def on_phase(self, phase: Phase) -> None:
        self._phase = phase
