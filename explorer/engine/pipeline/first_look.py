"""One pass over all stretches before any is priced: what each sends and receives, and which of them are equal.

Equal stretches (the layers of a transformer) cost the same, so a few of each kind are timed, alone, with what this pass
saw at their borders played back. Equal are those of one make (classes, settings, parameters and inputs by shape, the
functions between blocks) that held the same bytes at every action: experts that were sent other tokens are not.
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
from explorer.engine.world.bits import same_bits
from explorer.plan.pipeline.actions import Action, Rows
from explorer.record.pipeline_run import RankMemory

N_MICROBATCHES = 2
N_OF_A_KIND = 2
"""Stretches of a kind that are timed; their readings are one."""


@dataclass(frozen=True)
class FirstLook:
    """What the borders of stages tell, and whom to price."""

    mail: Mail
    kinds: tuple[int, ...]
    """By stage, the first one that is equal to it."""
    passed: dict[int, int] = field(default_factory=dict)
    """By stage, bytes that came in and go on as they are."""
    overwriting: frozenset[int] = frozenset()
    """Stages that work in place on what they receive: a checkpoint could not run them again."""
    loss_bytes: int = 0

    def some_of(self, kinds: Iterable[int]) -> frozenset[int]:
        """The first few stages of each of these kinds."""
        members = ([j for j, kind in enumerate(self.kinds) if kind == wanted] for wanted in set(kinds))
        return frozenset(j for one in members for j in one[:N_OF_A_KIND])


def look_at(pipeline: Pipeline, tick: Callable[[], None]) -> FirstLook:
    """Two passes over the whole `pipeline`, one stage a rank: one listens at the borders, one weighs."""
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
    """What a stage is built of: two of one make do the same work."""
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
    """One microbatch after the other: a forward follows a backward, as most do in a schedule."""
    order = [(kind, i) for i in range(N_MICROBATCHES) for kind in kinds]
    return tuple(tuple(Action(stage, kind, i) for kind, i in order) for stage in range(n_stages))


@contextmanager
def listening(
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
class Level:
    """Held bytes of one action above those at its entry."""

    entry: int
    high: int = 0
    left: int = 0


Levels = defaultdict[str, Level]


def levels_of(memory: RankMemory) -> Levels:
    """By action. One that allocates and frees nothing (a view, work in place) is at no level: zero."""
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
    """Where its bytes lie."""
    return tensor.untyped_storage().data_ptr()


def n_bytes(tensor: Tensor) -> int:
    """The bytes of its elements."""
    return tensor.numel() * tensor.element_size()
