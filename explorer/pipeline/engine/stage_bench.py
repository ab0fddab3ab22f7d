"""Measurement of the single stages of a pipeline: which stages are equal, and time and bytes of every action.

The pipeline has two microbatches: the first backward makes the parameters' gradients, the second adds to them.

Equal stages (the layers of a transformer) cost the same, so a few of each kind are timed alone, with recorded tensors
at their borders. Equal stages have one make (classes, settings, parameters and inputs by shape, the functions between
blocks) and hold the same bytes at every action. Experts with different tokens are not equal.

A run of the whole model (engine/bench/measure) does not replace this bench: it has no borders of stages.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product

from torch import Tensor

from explorer.engine.state.bits import same_bits
from explorer.pipeline.engine.build import Pipeline
from explorer.pipeline.engine.in_process import Mail, run_pass
from explorer.pipeline.engine.stages import StageModule
from explorer.pipeline.engine.tape import Meta
from explorer.pipeline.plan.actions import Action, Rows
from explorer.pipeline.record.step import ActionCost, ActionTime, RankMemory

N_MICROBATCHES = 2
N_OF_A_KIND = 2
"""Timed stages of each kind. Their readings are pooled."""
BeginPass = Callable[[], None]
"""Called before every pass, to report it."""


@dataclass(frozen=True)
class Survey:
    """Tensors at the borders of stages, and the kinds of stages to price."""

    mail: Mail
    kinds: tuple[int, ...]
    """By stage, the first equal stage."""
    passed: dict[int, int] = field(default_factory=dict)
    """By stage, received bytes that are sent on unchanged."""
    overwriting: frozenset[int] = frozenset()
    """Stages that work in place on received tensors, which a checkpoint cannot run again."""
    loss_bytes: int = 0

    def samples(self, kinds: Iterable[int]) -> frozenset[int]:
        """The first few stages of each kind in `kinds`."""
        priced = set(kinds)
        n_before = [self.kinds[:j].count(kind) for j, kind in enumerate(self.kinds)]
        return frozenset(j for j, kind in enumerate(self.kinds) if kind in priced and n_before[j] < N_OF_A_KIND)


def survey(pipeline: Pipeline, begin_pass: BeginPass) -> Survey:
    """Two passes over the whole `pipeline`, one stage a rank: the first reads the borders, the second the memory."""
    pipeline = dataclasses.replace(pipeline, rows=_one_by_one(len(pipeline.parts)))
    inputs: dict[int, list[Tensor]] = {}
    passed: dict[int, int] = {}
    overwriting = set()

    def before(module: StageModule, received: tuple[Tensor, ...]) -> None:
        inputs[module.part.stage] = [tensor.detach().clone() for tensor in received]

    def after(module: StageModule, received: tuple[Tensor, ...], sent: tuple[Tensor, ...]) -> None:
        stage = module.part.stage
        storages = {_storage(tensor) for tensor in received}
        passed[stage] = sum(tensor.nbytes for tensor in sent if _storage(tensor) in storages)
        if not all(same_bits(was, now.detach()) for was, now in zip(inputs.pop(stage), received, strict=True)):
            overwriting.add(stage)

    begin_pass()
    with _hooks(pipeline, after, before=before):
        first = run_pass(pipeline, keep_mail=True)
    begin_pass()
    memory = run_pass(pipeline, memory=True).memory()
    first_of_kind: dict[Hashable, int] = {}
    kinds = tuple(
        first_of_kind.setdefault((_make(module), _signature(memory[stage]), passed[stage], stage in overwriting), stage)
        for stage, module in enumerate(pipeline.modules)
    )
    return Survey(first.mail, kinds, passed, frozenset(overwriting), first.loss_bytes)


class StageBench:
    """Warm stages of a pipeline, one rank a stage, and the readings of all passes."""

    def __init__(self, pipeline: Pipeline, surveyed: Survey, stages: Collection[int], begin_pass: BeginPass) -> None:
        """Readings of `stages` of one kind are pooled."""
        self._begin_pass, self._survey, self._stages = begin_pass, surveyed, stages
        self.pipeline = dataclasses.replace(pipeline, rows=_one_by_one(len(pipeline.parts)))
        self._times: defaultdict[tuple[int, str], list[ActionTime]] = defaultdict(list)
        self._run()

    def _run(self) -> tuple[ActionTime, ...]:
        self._begin_pass()
        return run_pass(self.pipeline, alone=(self._stages, self._survey.mail)).actions

    def time(self) -> None:
        """Times one pass by the device's clock, and adds the readings to earlier readings."""
        for time in self._run():
            if time.kind == "F" or time.microbatch:  # the first backward adds to nothing, all others do
                self._times[self._survey.kinds[time.stage], time.kind].append(time)

    def ms(self, stage: int, kind: str, what: str = "duration_ms") -> float:
        """Median over all readings of the stage's kind, in milliseconds; `what` is a field of ActionTime."""
        return statistics.median(getattr(time, what) for time in self._times[self._survey.kinds[stage], kind])

    def least_ms(self, stage: int, kind: str) -> float:
        """The quickest reading in milliseconds, where a busy machine shows least."""
        return min(time.duration_ms for time in self._times[self._survey.kinds[stage], kind])

    def costs(self) -> dict[int, ActionCost]:
        """Costs by kind, for the kinds of the bench's stages, after one pass with memory recorded."""
        kinds = sorted({self._survey.kinds[stage] for stage in self._stages})
        self._begin_pass()
        trace = run_pass(self.pipeline, alone=(kinds, self._survey.mail), memory=True)
        levels = {memory.rank: levels_of(memory) for memory in trace.memory()}
        return {stage: self._cost(stage, levels[stage]) for stage in kinds}

    def _cost(self, stage: int, levels: StageLevels) -> ActionCost:
        forward, first_back, back = levels["F0"], levels["B0"], levels["B1"]
        last = len(self.pipeline.parts) - 1
        made = self._survey.loss_bytes
        if stage < last:
            made = sum(m.n_bytes for m in self.pipeline.parts[stage].metas_out) - self._survey.passed[stage]
        return ActionCost(
            forward_ms=self.ms(stage, "F"),
            backward_ms=self.ms(stage, "B"),
            recompute_ms=self.ms(stage, "B", "recompute_ms"),
            saved_bytes=forward.left,
            forward_extra_bytes=forward.high,
            first_backward_extra_bytes=first_back.high,
            backward_extra_bytes=back.high,
            # Saved tensors are freed; tensors sent either way, or the loss, are still held here.
            sent_gradient_bytes=max(back.left + forward.left - made, 0) if stage else 0,
        )


@contextmanager
def _hooks(
    pipeline: Pipeline, after: Callable[..., object] | None = None, before: Callable[..., object] | None = None
) -> Iterator[None]:
    """Calls `before(module, received)` before and `after(module, received, sent)` after every stage's forward."""
    hooks = [module.register_forward_hook(after) for module in pipeline.modules if after is not None]
    hooks += [module.register_forward_pre_hook(before) for module in pipeline.modules if before is not None]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _one_by_one(n_stages: int) -> Rows:
    """Rows that run one microbatch after the other. Forwards follow backwards, as in most of a schedule."""
    order = list(product(range(N_MICROBATCHES), "FB"))
    return tuple(tuple(Action(stage, kind, i) for i, kind in order) for stage in range(n_stages))


@dataclass
class Level:
    """Held bytes of one action above the bytes at its entry: the highest, and those left at its end."""

    entry: int
    high: int = 0
    left: int = 0


StageLevels = Mapping[str, Level]


def levels_of(memory: RankMemory) -> defaultdict[str, Level]:
    """Levels of a stage's actions by kind and microbatch, such as `F0`. An action that allocates nothing has zeros."""
    levels: defaultdict[str, Level] = defaultdict(lambda: Level(0))
    before = 0
    for n_bytes, index in zip(memory.held_bytes, memory.action, strict=True):
        if index >= 0:
            level = levels.setdefault(memory.actions[index][-2:], Level(before))
            level.left = n_bytes - level.entry
            level.high = max(level.high, level.left)
        before = n_bytes
    return levels


def _signature(memory: RankMemory) -> Hashable:
    return tuple(sorted((name, level.high, level.left) for name, level in levels_of(memory).items()))


def _make(module: StageModule) -> Hashable:
    """The make of a stage: its parts and shapes. Two stages of one make do the same work."""
    part = module.part
    steps = tuple((step.grad, step.random, _target(module, step.target)) for step in part.steps)
    tensors = (*module.parameters(), *module.buffers())
    shapes = tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors)
    return steps, shapes, (bool(part.stage), part.is_last, _shapes(part.metas_in), _shapes(part.metas_out))


def _target(module: StageModule, target: object) -> Hashable:
    if not isinstance(target, str):
        return target
    modules = module.get_submodule(target.replace(".", "/")).named_modules()
    return tuple((name, type(inner), inner.training, inner.extra_repr()) for name, inner in modules)


def _shapes(metas: Iterable[Meta]) -> Hashable:
    return tuple((meta.shape, meta.dtype, meta.requires_grad) for meta in metas)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
