"""A tape cut into stages. Each stage is a separate module that runs a stretch of the model's forward.

(1) A step belongs to the stage of the last block before it; steps before the first block belong to stage 0.
(2) A value that a later stage reads crosses every boundary on the way: stages talk to neighbours only.
(3) Values without inputs (positions, masks: no input, parameter or random number) are made again in each stage.
(4) Boundary tensors are contiguous both ways, because torch's transport refuses or garbles others.
(5) Blocks that the policy recomputes together (a segment) stay one checkpoint, and may not be cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from explorer.engine.pipeline.cut.keyed_rng import START, KeyedRng
from explorer.engine.pipeline.cut.segments import Segment, run_segment
from explorer.engine.pipeline.cut.tape import Meta, Path, Step, Tape, Value
from explorer.errors import InvalidPlan


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
    made_in = {index: 0 for index in range(tape.n_inputs)}
    for step, home in zip(tape.steps, homes, strict=True):
        made_in.update(dict.fromkeys(step.writes, home))
    needed: list[set[int]] = [set() for _ in stages]
    chosen: list[list[Step]] = []
    final = _values(tape.output)
    for j in range(len(stages)):
        steps = [step for step, home in zip(tape.steps, homes, strict=True) if home == j]
        reads = set().union(*(step.reads for step in steps)) if steps else set()
        if j == len(stages) - 1:
            reads |= final
        again = _closure({v for v in reads if v in free and made_in[v] != j}, free)
        chosen.append([step for step in tape.steps if step.writes & again] + steps)
        needed[j] = {v for v in reads - again if made_in[v] < j}
    parts = []
    for j, blocks in enumerate(stages):
        receives = tuple(sorted({v for later in needed[j:] for v in later if made_in[v] < j}))
        sends = tuple(sorted({v for later in needed[j + 1 :] for v in later if made_in[v] <= j}))
        last = j == len(stages) - 1
        sends = tuple(sorted(final)) if last else sends
        parts.append(
            StagePart(
                stage=j,
                blocks=blocks,
                steps=tuple(chosen[j]),
                receives=receives if j else tuple(range(tape.n_inputs)),
                sends=sends,
                metas_in=tuple(tape.metas[v] for v in receives) if j else tape.metas[: tape.n_inputs],
                metas_out=tuple(tape.metas[v] for v in sends),
                is_last=last,
            )
        )
    return tuple(parts)


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
        """Segments by the place of their first step."""
        self._rng = rng
        self._last_use = _last_uses(part)
        self._root = (model,)  # in a tuple: the stage holds its own blocks as children, not the whole model
        for step in part.steps:
            if isinstance(step.target, str):
                block = model.get_submodule(step.target)
                self.add_module(step.target.replace(".", "/"), block)
                if step.target in part.blocks:
                    block.register_forward_pre_hook(partial(self._enter, step.target))
            for dotted in sorted(step.paths):
                self._adopt(dotted)

    def _adopt(self, dotted: str) -> None:
        tensor = _at(self._root[0], dotted)
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
        place = 0
        while place < len(part.steps):
            segment = self.segments.get(place) if self.checkpointing else None
            if segment is None:
                self._run(place, part.steps[place], values)
            else:
                run_segment(segment, values)
            place += 1 if segment is None else segment.n_steps
        sent = tuple(values[index].contiguous() for index in part.sends)
        if part.is_last:
            return sent
        # A split backward detaches the sent tensor from its graph, in place, while a checkpoint of this stage still
        # has to run again from the same tensor. So another tensor over the same bytes is sent.
        return tuple(Contiguous.apply(tensor) if tensor.requires_grad else tensor for tensor in sent)

    def _enter(self, fqn: str, *_: Any) -> None:
        self._rng.enter(fqn, self.microbatch)

    def _run(self, place: int, step: Step, values: dict[int, Tensor]) -> None:
        args, kwargs = tree_map(lambda leaf: self._tensor(leaf, values), (step.args, step.kwargs))
        for index in self._last_use[place]:
            values.pop(index, None)
        target = step.target
        function: Any = self._root[0].get_submodule(target) if isinstance(target, str) else target
        with torch.set_grad_enabled(step.grad and torch.is_grad_enabled()):
            output = function(*args, **kwargs)
        _match(step.output, output, values)
        for path, value in step.side_outputs:
            values[value.index] = _at(self._root[0], path)

    def _tensor(self, leaf: Any, values: dict[int, Tensor]) -> Any:
        if isinstance(leaf, Value):
            return values[leaf.index]
        return _at(self._root[0], leaf.dotted) if isinstance(leaf, Path) else leaf


class Contiguous(torch.autograd.Function):
    """Passes its input on. The gradient goes back contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # A new tensor over the same bytes rather than a view, so that the stage's first operation may work in place.
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(
            x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def rebuild_output(tape: Tape, sent: tuple[Tensor, ...]) -> Any:
    """The model's return value, from the tensors sent by the last stage."""
    values = dict(zip(sorted(_values(tape.output)), sent, strict=True))
    return tree_map(lambda leaf: values[leaf.index] if isinstance(leaf, Value) else leaf, tape.output)


def _homes(tape: Tape, stages: tuple[tuple[str, ...], ...]) -> list[int]:
    stage_of = {fqn: j for j, blocks in enumerate(stages) for fqn in blocks}
    homes, now, faults = [], 0, []
    seen: set[int] = set()
    for step in tape.steps:
        home = stage_of.get(step.target) if isinstance(step.target, str) else None
        if home is not None and home < now:
            faults.append(f"{step.name} of stage {home} runs after stage {now} has begun")
        now = now if home is None else max(home, now)
        seen.add(now if home is None else home)
        homes.append(now)
    faults += [f"stage {j} ({', '.join(blocks)}) never runs" for j, blocks in enumerate(stages) if j not in seen]
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
        if pure and all(index in free for index in step.reads):
            free.update(dict.fromkeys(step.writes, step))
    return free


def _closure(wanted: set[int], free: dict[int, Step]) -> set[int]:
    needed, todo = set[int](), list(wanted)
    while todo:
        index = todo.pop()
        if index not in needed:
            needed.add(index)
            todo += free[index].reads
    return needed


def _last_uses(part: StagePart) -> list[tuple[int, ...]]:
    """By step: the values that no later step reads."""
    last = {index: place for place, step in enumerate(part.steps) for index in step.reads}
    kept = set(part.sends)
    return [
        tuple(index for index in step.reads if last[index] == place and index not in kept)
        for place, step in enumerate(part.steps)
    ]


def _match(shape: Any, output: Any, values: dict[int, Tensor]) -> None:
    """Files the tensors of `output` under the values of `shape`, which has the same structure."""
    tree_map(
        lambda leaf, tensor: values.__setitem__(leaf.index, tensor) if isinstance(leaf, Value) else None, shape, output
    )


def _values(tree: Any) -> set[int]:
    indices: set[int] = set()
    tree_map(lambda leaf: indices.add(leaf.index) if isinstance(leaf, Value) else None, tree)
    return indices


def _at(model: nn.Module, dotted: str) -> Any:
    owner, _, name = dotted.rpartition(".")
    return getattr(model.get_submodule(owner), name)
