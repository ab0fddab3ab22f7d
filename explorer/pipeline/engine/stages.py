"""A tape cut into stages. Each stage is a separate module that runs a stretch of the model's forward.

(1) A step belongs to the stage of the last block before it; steps before the first block belong to stage 0.
(2) A value that a later stage reads crosses every boundary on the way: stages talk to neighbours only.
(3) Values without inputs (positions, masks: no input, parameter or random number) are made again in each stage.
(4) Boundary tensors are contiguous both ways, because torch's transport refuses or garbles others.
(5) Blocks that the policy recomputes together (a segment) stay one checkpoint, and may not be cut.

`apply_policy` puts a segment onto the Sequential that holds its blocks, but a stage calls the blocks and never the
Sequential. So the stage gets a small separate Sequential, at the same path, with the policy on it. Blocks that the
model's code calls one after the other need no Sequential, because the stage calls the blocks in the same way.

    model.layers (Sequential)   0  1 [2  3] 4  5        stage 1: 2 ─▶ 3 becomes one call of layers(2, 3), checkpointed
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from explorer.engine.policy.apply import apply_policy
from explorer.engine.policy.units import runs_its_children
from explorer.engine.state.rng import generators_of
from explorer.errors import InvalidPlan
from explorer.pipeline.engine.microbatches import START, KeyedRng
from explorer.pipeline.engine.tape import Meta, Path, Step, Tape, Value
from explorer.plan.names import is_within
from explorer.record.policy import Policy, Unit
from explorer.record.run import PipelinePlan


@dataclass(frozen=True)
class StagePart:
    """The steps of one stage, and the values that cross its borders, by number."""

    stage: int
    blocks: tuple[str, ...]
    steps: tuple[Step, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    metas_in: tuple[Meta, ...]
    metas_out: tuple[Meta, ...]
    is_last: bool


def cut_tape(tape: Tape, stages: tuple[tuple[str, ...], ...]) -> tuple[StagePart, ...]:
    """The parts of all stages. Raises InvalidPlan, with the block's name, if a block runs again behind a cut."""
    homes = _homes(tape, stages)
    free = _free_values(tape)
    made_in = dict.fromkeys(range(tape.n_inputs), 0)
    for step, home in zip(tape.steps, homes, strict=True):
        made_in.update(dict.fromkeys(step.writes, home))
    needed: list[set[int]] = []
    steps_of: list[tuple[Step, ...]] = []
    final = _values(tape.output)
    last = len(stages) - 1
    for j in range(len(stages)):
        steps = tuple(step for step, home in zip(tape.steps, homes, strict=True) if home == j)
        reads = set[int]().union(*(step.reads for step in steps), final if j == last else ())
        again = _with_sources({v for v in reads if v in free and made_in[v] != j}, free)
        steps_of.append((*(step for step in tape.steps if step.writes & again), *steps))
        needed.append({v for v in reads - again if made_in[v] < j})
    parts = []
    for j, blocks in enumerate(stages):
        receives = sorted({v for later in needed[j:] for v in later if made_in[v] < j}) if j else range(tape.n_inputs)
        sends = sorted(final if j == last else {v for later in needed[j + 1 :] for v in later if made_in[v] <= j})
        parts.append(
            StagePart(
                stage=j,
                blocks=blocks,
                steps=steps_of[j],
                receives=tuple(receives),
                sends=tuple(sends),
                metas_in=tuple(tape.metas[v] for v in receives),
                metas_out=tuple(tape.metas[v] for v in sends),
                is_last=j == last,
            )
        )
    return tuple(parts)


@dataclass(frozen=True)
class Segment:
    """`n_steps` steps from `index` on, run by one call."""

    index: int
    n_steps: int
    run: nn.Sequential
    reads: int
    """Number of the value that goes in."""
    writes: int


class StageModule(nn.Module):
    """A stage: takes the received tensors (stage 0: the tensors of the inputs), returns the tensors to send.

    Set `microbatch` before every forward and every backward: keyed random numbers depend on it.
    `checkpointing` says whether the segments of the policy run as checkpoints.
    """

    def __init__(self, model: nn.Module, part: StagePart, rng: KeyedRng) -> None:
        super().__init__()
        self.part = part
        self.microbatch = 0
        self.checkpointing = True
        self.segments: dict[int, Segment] = {}
        """Segments by the index of their first step."""
        self._rng = rng
        self._last_use = _last_uses(part)
        self._root = (model,)  # in a tuple: the stage holds its own blocks as children, not the whole model
        for step in part.steps:
            if isinstance(step.target, str):
                block = model.get_submodule(step.target)
                self.add_module(step.target.replace(".", "/") or "model", block)
                if step.target in part.blocks:
                    block.register_forward_pre_hook(partial(self._enter, step.target))
            for dotted in sorted(step.paths):
                self._adopt(dotted)

    def _adopt(self, dotted: str) -> None:
        tensor = _attribute(self._root[0], dotted)
        name = f"own/{dotted.replace('.', '/')}"
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        elif isinstance(tensor, Tensor):
            self.register_buffer(name, tensor)

    def forward(self, *received: Tensor) -> tuple[Tensor, ...]:
        part = self.part
        entered = [Contiguous.apply(tensor) if part.stage and tensor.requires_grad else tensor for tensor in received]
        values: dict[int, Tensor] = dict(zip(part.receives, entered, strict=True))
        del entered
        if part.stage == 0:
            self._rng.enter(START, self.microbatch)
        index = 0
        while index < len(part.steps):
            segment = self.segments.get(index) if self.checkpointing else None
            if segment is None:
                self._run(index, part.steps[index], values)
            else:
                value = values.pop(segment.reads)  # released during the call, as between blocks
                values[segment.writes] = segment.run(value)
                del value
            index += 1 if segment is None else segment.n_steps
        sent = tuple(values[index].contiguous() for index in part.sends)
        if part.is_last:
            return sent
        # A split backward detaches the sent tensor from its graph, in place, while a checkpoint of this stage still
        # has to run again from the same tensor. So another tensor over the same bytes is sent.
        return tuple(Contiguous.apply(tensor) if tensor.requires_grad else tensor for tensor in sent)

    def _enter(self, fqn: str, *_: object) -> None:
        self._rng.enter(fqn, self.microbatch)

    def _run(self, index: int, step: Step, values: dict[int, Tensor]) -> None:
        args, kwargs = tree_map(lambda leaf: self._tensor(leaf, values), (step.args, step.kwargs))
        for number in self._last_use[index]:
            values.pop(number, None)
        target = step.target
        function: Any = self._root[0].get_submodule(target) if isinstance(target, str) else target
        with torch.set_grad_enabled(step.grad and torch.is_grad_enabled()):
            output = function(*args, **kwargs)
        tree_map(  # files the tensors of `output`, which has the structure of `step.output`
            lambda leaf, tensor: values.__setitem__(leaf.index, tensor) if isinstance(leaf, Value) else None,
            step.output,
            output,
        )
        for path, value in step.side_outputs:
            values[value.index] = _attribute(self._root[0], path)

    def _tensor(self, leaf: object, values: dict[int, Tensor]) -> object:
        if isinstance(leaf, Value):
            return values[leaf.index]
        return _attribute(self._root[0], leaf.dotted) if isinstance(leaf, Path) else leaf


class Contiguous(torch.autograd.Function):
    """Passes its input on. The gradient goes back contiguous."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        # A new tensor over the same bytes rather than a view, so that the stage's first operation may work in place.
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(
            x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
        )

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def rebuild_output(tape: Tape, sent: tuple[Tensor, ...]) -> object:
    """The model's return value, from the tensors sent by the last stage."""
    values = dict(zip(sorted(_values(tape.output)), sent, strict=True))
    return tree_map(lambda leaf: values[leaf.index] if isinstance(leaf, Value) else leaf, tape.output)


def divide_policy(model: nn.Module, policy: Policy, plan: PipelinePlan) -> tuple[Policy, tuple[Unit, ...]]:
    """The policy for `apply_policy` on the whole model, and the segments for the stages.

    Raises InvalidPlan for a segment with a cut inside, and for a unit that contains whole blocks of stages.
    """
    stage_of = {fqn: stage for stage, blocks in enumerate(plan.stages) for fqn in blocks}
    wide = [unit for unit in policy.units if len(unit.blocks) > 1 and set(unit.blocks) & set(stage_of)]
    faults = [f"{'+'.join(unit.blocks)} is cut" for unit in wide if len(set(map(stage_of.get, unit.blocks))) > 1]
    for unit in policy.units:
        inside = [fqn for fqn in stage_of if fqn not in unit.blocks and is_within(fqn, *unit.blocks)]
        if inside:
            faults.append(f"{'+'.join(unit.blocks) or 'the model'} holds {len(inside)} blocks of the stages")
    if faults:
        raise InvalidPlan(
            f"The policy and the stages do not fit together: {'; '.join(faults)}.",
            hint="Cut between recomputed segments, or recompute each block on its own.",
        )
    segments = tuple(u for u in wide if runs_its_children(model.get_submodule(u.blocks[0].rpartition(".")[0])))
    rest = tuple(unit for unit in policy.units if unit not in segments)
    return replace(policy, units=rest), segments


def segment_of(model: nn.Module, unit: Unit, policy: Policy, steps: tuple[Step, ...]) -> Segment:
    """`unit` as a segment of `steps`. Raises InvalidPlan if its blocks do not directly follow each other."""
    first = next((k for k, step in enumerate(steps) if step.target in unit.blocks), 0)
    members = steps[first : first + len(unit.blocks)]
    n_calls = sum(step.target in unit.blocks for step in steps)
    in_order = n_calls == len(members) and tuple(step.target for step in members) == unit.blocks
    if not in_order or not all(_follows(before, after) for before, after in zip(members, members[1:])):
        raise InvalidPlan(
            f"{'+'.join(unit.blocks)} cannot run as one segment: something happens between its blocks.",
            hint="Recompute each block on its own.",
        )
    *path, _ = unit.blocks[0].split(".")
    run = nn.Sequential(OrderedDict((fqn.rpartition(".")[2], model.get_submodule(fqn)) for fqn in unit.blocks))
    run.train(model.get_submodule(".".join(path)).training)
    root: nn.Module = run
    for name in reversed(path):
        outer = nn.Module()
        outer.add_module(name, root)
        root = outer
    generators = generators_of(model)
    restored = [generators[path] for path in policy.restore_rng if path in generators]
    rest = tuple(name for name in policy.restore_rng if name not in generators)
    apply_policy(root, replace(policy, units=(unit,), restore_rng=rest), generators=restored)
    (reads,), (writes,) = members[0].reads, members[-1].writes
    return Segment(first, len(members), run, reads, writes)


def _follows(before: Step, after: Step) -> bool:
    """Whether `after` takes the result of `before`, and nothing else."""
    return isinstance(before.output, Value) and after.args == (before.output,) and not after.kwargs


def _homes(tape: Tape, stages: tuple[tuple[str, ...], ...]) -> list[int]:
    stage_of = {fqn: j for j, blocks in enumerate(stages) for fqn in blocks}
    homes: list[int] = []
    now, faults, running = 0, [], set()
    for step in tape.steps:
        home = stage_of.get(step.target) if isinstance(step.target, str) else None
        if home is not None and home < now:
            faults.append(f"{step.name} of stage {home} runs after stage {now} has begun")
        now = now if home is None else max(home, now)
        running.add(now if home is None else home)
        homes.append(now)
    faults += [f"stage {j} ({', '.join(blocks)}) never runs" for j, blocks in enumerate(stages) if j not in running]
    if faults:
        raise InvalidPlan(
            f"This split cannot run: {'; '.join(dict.fromkeys(faults))}.",
            hint="A block that is called several times stays in one stage with all that runs between its calls.",
        )
    return homes


def _free_values(tape: Tape) -> dict[int, Step]:
    """Values without inputs, as in rule 3, and the step that makes each value."""
    free: dict[int, Step] = {}
    for step in tape.steps:
        pure = not isinstance(step.target, str) and not step.paths and not step.random
        if pure and step.reads <= free.keys():
            free.update(dict.fromkeys(step.writes, step))
    return free


def _with_sources(values: set[int], free: dict[int, Step]) -> set[int]:
    """`values` and all values that their steps read."""
    needed, todo = set[int](), list(values)
    while todo:
        index = todo.pop()
        if index not in needed:
            needed.add(index)
            todo += free[index].reads
    return needed


def _last_uses(part: StagePart) -> list[tuple[int, ...]]:
    """By step: the values that no later step reads."""
    last = {value: index for index, step in enumerate(part.steps) for value in step.reads}
    return [
        tuple(value for value in step.reads if last[value] == index and value not in part.sends)
        for index, step in enumerate(part.steps)
    ]


def _values(tree: object) -> set[int]:
    return {leaf.index for leaf in tree_leaves(tree) if isinstance(leaf, Value)}


def _attribute(model: nn.Module, dotted: str) -> Any:
    owner, _, name = dotted.rpartition(".")
    return getattr(model.get_submodule(owner), name)
