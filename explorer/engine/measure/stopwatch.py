"""Time without any recording, and time per block with light hooks: two kinds of steps that are never the same step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from explorer.engine.device.clocks import Clock
from explorer.engine.step import Trainee, run_step
from explorer.engine.watch.scopes import BlockScopes, Frame
from explorer.record.measurement import Phase, Samples
from explorer.record.policy import Policy


@dataclass(frozen=True)
class BlockSamples:
    """Milliseconds of a block over the repeated steps, everything below included."""

    forward: Samples = Samples()
    recompute: Samples = Samples()


def step_ms(trainee: Trainee, clock: Clock) -> dict[str, float]:
    """Milliseconds of one step by phase, and of the whole as `step`."""
    marks: list[tuple[str, Any]] = []

    def on_phase(phase: Phase) -> None:
        marks.append((phase, clock.mark()))

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
    """Milliseconds of one step by (fqn, runs again); everything below a block is charged to it.

    Ancestors of a block that runs again are charged for that, though they do not run again themselves.
    """
    watch = _BlockWatch(clock)
    segments = [unit.blocks[0] for unit in policy.units if len(unit.blocks) > 1]
    scopes = BlockScopes(trainee.model, watch, segments=segments, new_frame=_Open)
    clock.settle()
    with scopes:
        run_step(trainee, watch.on_phase)
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
        """(block, runs again, mark) of what was entered and not left."""


class _BlockWatch:
    """Listens to one step."""

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

    def rerun_changed(self, frame: Any) -> None:
        """A segment's blocks are entered and left one by one."""

    def on_phase(self, phase: Phase) -> None:
        self._phase = phase
