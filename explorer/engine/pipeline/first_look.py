"""First pass over all stretches, before pricing: the tensors at their borders, and the equal stretches.

Equal stretches (the layers of a transformer) cost the same. A few of each kind are timed alone, with the border
tensors of this pass as inputs. Equal stretches have one make (classes, settings, parameters and inputs by shape, the
functions between blocks) and hold the same bytes at every action. Experts with different tokens are not equal.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from explorer.engine.pipeline.cut.build import Pipeline
from explorer.engine.pipeline.cut.split import StageModule
from explorer.engine.pipeline.cut.tape import Meta
from explorer.engine.pipeline.play.inproc import Mail, run_pass
from explorer.engine.state.bits import same_bits
from explorer.plan.pipeline.actions import Action, Rows
from explorer.record.pipeline_run import RankMemory

N_MICROBATCHES = 2
N_OF_A_KIND = 2
"""Timed stretches of each kind. Their readings are pooled."""


@dataclass(frozen=True)
class FirstLook:
    """Tensors at the borders of stages, and the kinds of stages to price."""

    mail: Mail
    kinds: tuple[int, ...]
    """By stage, the first equal stage."""
    passed: dict[int, int] = field(default_factory=dict)
    """By stage, received bytes that are sent on unchanged."""
    overwriting: frozenset[int] = frozenset()
    """Stages that work in place on received tensors, which a checkpoint cannot run again."""
    loss_bytes: int = 0

    def some_of(self, kinds: Iterable[int]) -> frozenset[int]:
        """The first few stages of each kind in `kinds`."""
        members = ([j for j, kind in enumerate(self.kinds) if kind == wanted] for wanted in set(kinds))
        return frozenset(j for one in members for j in one[:N_OF_A_KIND])


def look_at(pipeline: Pipeline, tick: Callable[[], None]) -> FirstLook:
    """Two passes over the whole `pipeline`, one stage a rank: the first reads the borders, the second the memory."""
    pipeline = dataclasses.replace(pipeline, rows=in_turn("FB", len(pipeline.parts)))
    came: dict[int, list[Tensor]] = {}
    passed: dict[int, int] = {}
    overwriting = set()

    def see_received(module: StageModule, received: tuple[Tensor, ...]) -> None:
        came[module.part.stage] = [tensor.detach().clone() for tensor in received]

    def see_sent(module: StageModule, received: tuple[Tensor, ...], sent: tuple[Tensor, ...]) -> None:
        stage = module.part.stage
        places = {place(tensor) for tensor in received}
        passed[stage] = sum(n_bytes(tensor) for tensor in sent if place(tensor) in places)
        if not all(same_bits(was, now.detach()) for was, now in zip(came.pop(stage), received, strict=True)):
            overwriting.add(stage)

    tick()
    with listening(pipeline, see_sent, before=see_received):
        first = run_pass(pipeline, keep_mail=True)
    tick()
    weighed = run_pass(pipeline, memory=True)
    memory = weighed.memory(pipeline, tuple(weighed.actions), range(len(pipeline.rows)))
    known: dict[Hashable, int] = {}
    kinds = tuple(
        known.setdefault((_make(module), _held(memory[stage]), passed[stage], stage in overwriting), stage)
        for stage, module in enumerate(pipeline.modules)
    )
    return FirstLook(first.mail, kinds, passed, frozenset(overwriting), first.loss_bytes)


def _make(module: StageModule) -> Hashable:
    """The make of a stage: its parts and shapes. Two stages of one make do the same work."""
    part, own = module.part, dict(module.named_parameters())
    steps = tuple(
        (
            step.grad,
            step.random,
            tuple(
                (name, type(inner), inner.training, inner.extra_repr())
                for name, inner in module.get_submodule(step.target.replace(".", "/")).named_modules()
            )
            if isinstance(step.target, str)
            else step.target,
        )
        for step in part.steps
    )
    tensors = (*own.values(), *module.buffers())
    shapes = tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in tensors)
    borders = (bool(part.stage), part.is_last, tuple(map(_shape, part.metas_in)), tuple(map(_shape, part.metas_out)))
    return steps, shapes, borders


def _shape(meta: Meta) -> Hashable:
    return meta.shape, meta.dtype, meta.requires_grad


def _held(memory: RankMemory) -> Hashable:
    return tuple(sorted((name[-2:], level.high, level.left) for name, level in levels_of(memory).items()))


def in_turn(kinds: str, n_stages: int) -> Rows:
    """Rows that run one microbatch after the other. Forwards follow backwards, as in most of a schedule."""
    order = [(kind, i) for i in range(N_MICROBATCHES) for kind in kinds]
    return tuple(tuple(Action(stage, kind, i) for kind, i in order) for stage in range(n_stages))


@contextmanager
def listening(
    pipeline: Pipeline, hear: Callable[..., object], before: Callable[..., object] | None = None
) -> Iterator[None]:
    """Calls `before(module, received)` before and `hear(module, received, sent)` after every stage's forward."""
    hooks = [module.register_forward_hook(hear) for module in pipeline.modules]
    if before is not None:
        hooks += [module.register_forward_pre_hook(before) for module in pipeline.modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Level:
    """Held bytes of one action above the bytes at its entry."""

    entry: int
    high: int = 0
    left: int = 0


Levels = defaultdict[str, Level]


def levels_of(memory: RankMemory) -> Levels:
    """Levels by action. An action that allocates and frees nothing (a view, work in place) has zero levels."""
    levels = Levels(lambda: Level(0))
    before = 0
    for held, index in zip(memory.held_bytes, memory.action, strict=True):
        if index >= 0:
            level = levels.setdefault(memory.actions[index], Level(before))
            level.left = held - level.entry
            level.high = max(level.high, level.left)
        before = held
    return levels


def place(tensor: Tensor) -> int:
    """Address of the tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def n_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor's elements."""
    return tensor.numel() * tensor.element_size()
