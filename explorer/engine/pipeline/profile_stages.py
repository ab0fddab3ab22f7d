"""One pipeline measured stage by stage: times and bytes of every action, its backward whole and in two.

The pipeline has two microbatches: the first backward makes the parameters' gradients, the second adds to them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from explorer.engine.pipeline.cut.build import Pipeline
from explorer.engine.pipeline.cut.split import Contiguous, StageModule
from explorer.engine.pipeline.play.inproc import run_pass
from explorer.engine.world.bits import same_bits
from explorer.errors import NotOnThisDevice
from explorer.plan.pipeline.actions import Action, Rows
from explorer.record.pipeline_cost import ActionCost, LastBlock, SplitCost
from explorer.record.pipeline_run import ActionTime, RankMemory

N_MICROBATCHES = 2


class StageBench:
    """One pipeline, warm, and the same with its backward split; one rank a stage, all that they read."""

    def __init__(self, pipeline: Pipeline, tick: Callable[[], None]) -> None:
        """`tick` is called before every pass."""
        self._tick = tick
        self.pipeline = pipeline = dataclasses.replace(pipeline, rows=_rows("FB", len(pipeline.parts)))
        self.split: Pipeline | None = None
        self._times: defaultdict[tuple[int, str], list[ActionTime]] = defaultdict(list)
        self.passed: dict[int, int] = {}
        self.overwriting: set[int] = set()
        """Stages that work in place on what they receive: a checkpoint could not run them again."""
        self._came: dict[int, list[Tensor]] = {}
        tick()
        with _listening(pipeline, self._see_sent, before=self._see_received):
            self.loss_bytes = run_pass(pipeline).loss_bytes
        self._came.clear()
        split = dataclasses.replace(pipeline, rows=_rows("FIW", len(pipeline.parts)))
        tick()
        try:
            run_pass(split)
        except (NotOnThisDevice, RuntimeError):  # torch wraps what goes wrong in a split backward
            return  # costs of other schedules are as good as ever, and a run that splits says what is wrong
        self.split = split

    def _see_received(self, module: StageModule, received: tuple[Tensor, ...]) -> None:
        self._came[module.part.stage] = [tensor.detach().clone() for tensor in received]

    def _see_sent(self, module: StageModule, received: tuple[Tensor, ...], sent: tuple[Tensor, ...]) -> None:
        stage = module.part.stage
        came = {_place(tensor) for tensor in received}
        self.passed[stage] = sum(n_bytes(tensor) for tensor in sent if _place(tensor) in came)
        if not all(same_bits(was, now.detach()) for was, now in zip(self._came[stage], received, strict=True)):
            self.overwriting.add(stage)

    def time(self) -> None:
        for pipeline in (self.pipeline, self.split):
            self._tick()
            for time in run_pass(pipeline).actions if pipeline is not None else ():
                if time.kind == "F" or time.microbatch:  # the first backward adds to nothing, all others do
                    self._times[time.stage, time.kind].append(time)

    def ms(self, stage: int, kind: str, what: str = "duration_ms") -> float:
        return statistics.median(getattr(time, what) for time in self._times[stage, kind])

    def least_ms(self, stage: int, kind: str) -> float:
        """The quickest, where a busy machine shows least."""
        return min(time.duration_ms for time in self._times[stage, kind])

    def costs(self, weight_ms_per_block: float) -> list[ActionCost]:
        """One a stage."""
        self._tick()
        whole = _watched(self.pipeline)
        costs = [self._cost(stage, memory) for stage, memory in enumerate(whole)]
        if self.split is None:
            return costs
        ways = []
        for watch in (_watched_inside, _watched_held, _watched):
            self._tick()
            ways.append([_levels(memory) for memory in watch(self.split)])
        splits = [
            self._split_cost(j, [way[j] for way in ways], cost, weight_ms_per_block) if j else None
            for j, cost in enumerate(costs)
        ]
        return [msgspec.structs.replace(cost, split=split) for cost, split in zip(costs, splits, strict=True)]

    def _cost(self, stage: int, memory: RankMemory) -> ActionCost:
        levels = _levels(memory)
        forward, first_back, back = (levels[f"{stage}{name}"] for name in ("F0", "B0", "B1"))
        last = len(self.pipeline.parts) - 1
        made = self.loss_bytes
        if stage < last:
            made = sum(m.n_bytes for m in self.pipeline.parts[stage].metas_out) - self.passed[stage]
        return ActionCost(
            forward_ms=self.ms(stage, "F"),
            backward_ms=self.ms(stage, "B"),
            recompute_ms=self.ms(stage, "B", "recompute_ms"),
            saved_bytes=forward.left,
            forward_extra_bytes=forward.high,
            first_backward_extra_bytes=first_back.high,
            backward_extra_bytes=back.high,
            # What was saved is gone; what was sent either way, or the loss, is still held here.
            sent_gradient_bytes=max(back.left + forward.left - made, 0) if stage else 0,
        )

    def _split_cost(self, stage: int, ways: list[Levels], cost: ActionCost, weight_ms_per_block: float) -> SplitCost:
        """`ways`: inside a longer stage, with its graph held all the same, and at the end of a stage."""
        inside, held, end = ({name: way[f"{stage}{name}"] for name in ("I1", "W0", "W1")} for way in ways)
        sent = (cost.sent_gradient_bytes or 0) - self.passed[stage]
        return SplitCost(
            input_ms=self.ms(stage, "I"),
            weight_ms=self.ms(stage, "W"),
            input_recompute_ms=self.ms(stage, "I", "recompute_ms"),
            weight_recompute_ms=self.ms(stage, "W", "recompute_ms"),
            weight_ms_per_block=weight_ms_per_block,
            input_extra_bytes=inside["I1"].high,
            owed_bytes=inside["I1"].left - sent,
            weight_extra_bytes=inside["W1"].high,
            first_weight_extra_bytes=inside["W0"].high,
            weight_end_bytes=inside["W1"].left,
            last=LastBlock(
                input_extra_bytes=end["I1"].high,
                held_bytes=held["I1"].left - sent,
                owed_bytes=end["I1"].left - sent,
                weight_extra_bytes=end["W1"].high,
                first_weight_extra_bytes=end["W0"].high,
            ),
        )


def _rows(kinds: str, n_stages: int) -> Rows:
    """One microbatch after the other: a forward follows a backward, as most do in a schedule."""
    order = [(kind, i) for i in range(N_MICROBATCHES) for kind in kinds]
    return tuple(tuple(Action(stage, kind, i) for kind, i in order) for stage in range(n_stages))


def _watched(pipeline: Pipeline) -> tuple[RankMemory, ...]:
    trace = run_pass(pipeline, memory=True)
    return trace.memory(pipeline, tuple(trace.actions), range(len(pipeline.rows)))


def _watched_held(pipeline: Pipeline) -> tuple[RankMemory, ...]:
    """With every stretch's output and graph held from outside, as they are while I goes on in the same stage."""
    graphs: list[Any] = []
    with _listening(pipeline, lambda module, received, sent: graphs.extend((one, one.grad_fn) for one in sent)):
        return _watched(pipeline)


def _watched_inside(pipeline: Pipeline) -> tuple[RankMemory, ...]:
    """The same, and gradients of what a stretch made are held by nobody but the backward that reads them."""
    graphs: list[Any] = []

    def let_go(module: StageModule, received: tuple[Tensor, ...], sent: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        came = {_place(tensor) for tensor in received}
        made = tuple(OwnGradient.apply(t) if t.requires_grad and _place(t) not in came else t for t in sent)
        graphs.extend(tensor.grad_fn for tensor in made)
        return made

    with _listening(pipeline, let_go):
        return _watched(pipeline)


class OwnGradient(Contiguous):
    """Passes on; what goes back is a copy of the gradient that came."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone()


@contextmanager
def _listening(
    pipeline: Pipeline, hear: Callable[..., object], before: Callable[..., object] | None = None
) -> Iterator[None]:
    """`hear(module, received, sent)` after every stage's forward, `before(module, received)` before it."""
    hooks = [module.register_forward_hook(hear) for module in pipeline.modules]
    if before is not None:
        hooks += [module.register_forward_pre_hook(before) for module in pipeline.modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class _Level:
    """Held bytes of one action above those at its entry."""

    entry: int
    high: int = 0
    left: int = 0


Levels = defaultdict[str, _Level]


def _levels(memory: RankMemory) -> Levels:
    """By action. One that allocates and frees nothing (a view, work in place) is at no level: zero."""
    levels = Levels(lambda: _Level(0))
    before = 0
    for held, index in zip(memory.held_bytes, memory.action, strict=True):
        if index >= 0:
            level = levels.setdefault(memory.actions[index], _Level(before))
            level.left = held - level.entry
            level.high = max(level.high, level.left)
        before = held
    return levels


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def n_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
