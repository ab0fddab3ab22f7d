"""What a watched step shows beside its results: random numbers, state that a recompute moves, and where forwards part.

The compared runs go without these instruments, because a dispatch mode or a hook may change torch's choice of kernels.

    forward     A₁ B₁ A₂          A called twice
    recompute          A₂ B₁ A₁

Draws of a forward and its recompute are paired by call: a recompute belongs to the latest forward of its unit that has
no recompute yet, because backward runs in reverse.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from explorer.engine.bench.step import Trainee, forward_backward, segment_heads
from explorer.engine.compare.diffs import in_double, is_floating
from explorer.engine.model.equal_models import plain_modules
from explorer.engine.state.bits import tensor_leaves
from explorer.engine.state.state_diff import State, StateKey, read_state, same_state, short_text
from explorer.engine.watch.departures import Departures
from explorer.engine.watch.entries import EntryWatch
from explorer.engine.watch.modes import draws_numbers
from explorer.engine.watch.scopes import BlockWatch, Frame
from explorer.record.allocations import Phase
from explorer.record.comparison import Comparison, ForwardDiff, MaskDiff, StateChange
from explorer.record.late_read import LateRead
from explorer.record.policy import Policy

_MASKS = (torch.ops.aten.bernoulli_, torch.ops.aten.bernoulli)
_WITH_MASK = (torch.ops.aten.native_dropout, torch.ops.aten._fused_dropout)


class RerunDraws(BlockWatch):
    """Finds random numbers of a recompute that the forward never drew, in models that checkpoint themselves.

    The units of such a model are not known, so each draw is compared with all forward draws of its shape: masks of
    many elements are not equal by chance.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._forward: dict[torch.Size, list[Tensor]] = defaultdict(list)
        self.n_drawn = 0
        """Number of draws of forwards inside backward."""
        self.others: Counter[str] = Counter()
        """Number of such draws that forward did not make, by block; the empty string is the model itself."""
        self.departures = Departures()

    def entered(self, block: int, frame: Frame, inputs: object) -> None:
        self.departures.entered(block)

    def left(self, block: int, frame: Frame, output: object) -> None:
        self.departures.left(block)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        self.departures.ran(func, result, self.running)
        if (draw := random_numbers(func, args, kwargs or {}, result)) is not None:
            earlier = self._forward[draw.shape]
            if torch._C._current_graph_task_id() == -1:
                earlier.append(draw)
            else:
                self.n_drawn += 1
                self.others.update([] if any(torch.equal(draw, other) for other in earlier) else [self.running])
        return result


@dataclass
class _Call:
    """One call of a unit with its draws in order, by the innermost block that drew."""

    unit: int
    """First block of the unit."""
    last: int
    again: bool
    is_segment: bool = False
    draws: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    @property
    def ends_with(self) -> int | None:
        """The block whose end ends the call; None for the recompute of a segment, which ends with its scope."""
        if self.again:
            return None if self.is_segment else self.unit
        return self.last


class RerunWatch(BlockWatch):
    """Watches a step of `model` under `policy`: draws inside the units, and state that changes in backward.

    The step announces its phases to `on_phase`. `masks` and `added_to` are complete after the exit.
    """

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        segments = segment_heads(policy)
        super().__init__(model, segments=segments)
        index = self.scopes.index
        self._last = {index[unit.blocks[0]]: index[unit.blocks[-1]] for unit in policy.units}
        self._segments = {index[fqn] for fqn in segments}
        self._open: list[_Call] = []
        self._waiting: dict[int, list[_Call]] = defaultdict(list)
        self._masks: dict[str, MaskDiff] = {}
        self._audit = StateAudit(model)
        self.on_phase = self._audit.on_phase
        self._entries = EntryWatch(model)
        self._saved_ops = {operator for unit in policy.units for operator in unit.save_ops}
        self.departures = Departures()
        self._watching = ExitStack()

    def __enter__(self) -> Self:
        self._watching.enter_context(self._entries.watching())
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._watching.close()
        self._audit.close()  # a step without an optimizer ends in its backward

    def added_to(self, comparison: Comparison) -> Comparison:
        """The comparison with what the step has shown."""
        changes = tuple(self._audit.changes.values())
        reads = tuple(self._entries.reads.values())
        return replace(comparison, masks=self.masks, masks_watched=True, state_changes=changes, late_reads=reads,
                       departures=tuple(self.departures.by_block.values()))  # fmt: skip

    @property
    def masks(self) -> tuple[MaskDiff, ...]:
        """One entry for each block that drew inside a recomputed unit, in the order of the model."""
        return tuple(sorted(self._masks.values(), key=lambda mask: self.scopes.index[mask.block]))

    def entered(self, block: int, frame: Frame, inputs: object) -> None:
        self.departures.entered(block)
        again = bool(frame.reruns) and frame.reruns[-1] == block
        if block in self._last and not (again and block in self._segments):
            self._open.append(_Call(block, self._last[block], again))

    def left(self, block: int, frame: Frame, output: object) -> None:
        self.departures.left(block)
        if self._open and block == self._open[-1].ends_with:
            self._close()

    def rerun_changed(self, frame: Frame) -> None:
        n_running = sum(unit in self._segments for unit in frame.reruns)
        n_open = sum(call.again and call.unit in self._segments for call in self._open)
        if n_running > n_open:
            segment = frame.reruns[-1]
            self._open.append(_Call(segment, self._last[segment], again=True, is_segment=True))
        else:
            self._close()

    def _close(self) -> None:
        call = self._open.pop()
        waiting = self._waiting[call.unit]
        if not call.again:
            waiting.append(call)
        elif waiting:
            self._compare(waiting.pop(), call)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        if self._open and str(func) not in self._saved_ops:
            self.departures.ran(func, result, self.running)
        if self._open and (draw := random_numbers(func, args, kwargs or {}, result)) is not None:
            for call in self._open:
                call.draws[self.running].append(draw)
        return result

    def _compare(self, forward: _Call, again: _Call) -> None:
        for block, draws in forward.draws.items():
            repeats = again.draws[block]
            pairs = list(zip(draws, repeats))
            so_far = self._masks.get(block, MaskDiff(block=block, n_elements=0, n_mismatched=0))
            self._masks[block] = MaskDiff(
                block=block,
                n_elements=so_far.n_elements + sum(first.numel() for first, _ in pairs),
                n_mismatched=so_far.n_mismatched + sum(_n_unequal(*pair) for pair in pairs),
                n_not_drawn_again=so_far.n_not_drawn_again + sum(draw.numel() for draw in draws[len(repeats) :]),
                is_mask=so_far.is_mask and all(draw.dtype is torch.bool for draw in draws),
            )


def _n_unequal(first: Tensor, second: Tensor) -> int:
    return int((first != second).sum()) if first.shape == second.shape else first.numel()


def random_numbers(func: Any, args: Any, kwargs: Any, result: Any) -> Tensor | None:
    """The random numbers of one call, safe from later writes: masks as booleans, other numbers as copies."""
    if not draws_numbers(func):
        return None
    kind = func.overloadpacket
    if kind in _WITH_MASK:
        return result[1].bool()
    if kind in _MASKS:
        return result != 0
    if "scaled_dot_product" in func.name():
        # Fused attention draws its mask inside the kernel: equal inputs and an equal mask give an equal output.
        names = [argument.name for argument in func._schema.arguments]
        passed = dict(zip(names, args)) | kwargs  # no dropout where the probability is left out
        return result[0].detach().clone() if passed.get("dropout_p") else None
    return result.detach().clone() if isinstance(result, Tensor) else None


@dataclass
class StateAudit:
    """Collects the state of `model` that backward changes: pass `on_phase` to the step, then read `changes`."""

    model: nn.Module
    changes: dict[StateKey, StateChange] = field(default_factory=dict)
    _after_forward: State | None = None

    def on_phase(self, phase: Phase | str) -> None:
        """Called at the start of each phase: compares the state after a backward with the state at its start."""
        if phase == "backward" and self._after_forward is None:
            self._after_forward = read_state(self.model)
        elif phase != "backward":
            self.close()

    def close(self) -> None:
        """Ends the current backward, if any."""
        if self._after_forward is None:
            return
        before, after = self._after_forward, read_state(self.model)
        self._after_forward = None
        for key in {**before, **after}:
            if key not in self.changes and not same_state(before.get(key), after.get(key)):
                block, name, kind = key
                self.changes[key] = StateChange(
                    block=block, name=name, kind=kind,
                    after_forward=short_text(before.get(key)), after_backward=short_text(after.get(key)),
                )  # fmt: skip


def late_reads(trainee: Trainee) -> tuple[LateRead, ...]:
    """Values that recomputes read late in the second step: caches that the first step filled are equal there."""
    entries = EntryWatch(trainee.model)
    with entries.watching():
        forward_backward(trainee)
        entries.reads.clear()
        forward_backward(trainee)
    return tuple(entries.reads.values())


_ROUNDS = 256
"""Units in the last place by which two sketches of one activation may differ."""
Sketch = tuple[tuple[Any, ...], ...]


@dataclass
class Forwards:
    """Calls of a model's blocks during one step, by plain name, in the order in which they end."""

    model: nn.Module
    calls: dict[tuple[str, int], tuple[Sketch, Sketch, str]] = field(default_factory=dict)
    """Input, output and description of each block's n-th call."""
    order: dict[str, str] = field(default_factory=dict)
    """Blocks in the order in which they are first entered, each with the strides of its first input."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The context around one step."""
        counts: dict[str, int] = defaultdict(int)
        inputs: dict[str, list[Sketch]] = defaultdict(list)

        def enter(fqn: str) -> Any:
            def hook(module: nn.Module, args: object, kwargs: object) -> None:
                tensors = tensor_leaves((args, kwargs))
                self.order.setdefault(fqn, str(tensors[0].stride()) if tensors else "")
                inputs[fqn].append(_sketch((args, kwargs)))

            return hook

        def leave(fqn: str) -> Any:
            def hook(module: nn.Module, args: object, output: object) -> None:
                given = inputs[fqn].pop()
                if torch._C._current_graph_task_id() == -1:  # a forward inside backward is a recompute
                    self.calls[fqn, counts[fqn]] = (given, _sketch(output), _description(module))
                    counts[fqn] += 1

            return hook

        with ExitStack() as hooks:
            for fqn, module in plain_modules(self.model):
                hooks.callback(module.register_forward_pre_hook(enter(fqn), with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(leave(fqn)).remove)
            yield


def forward_difference(baseline: Forwards, candidate: Forwards) -> ForwardDiff:
    """The first call, in the order of the baseline, whose output differs for the same input."""
    common = [key for key in baseline.calls if key in candidate.calls]
    n_calls = [sum(fqn == "" for fqn, _ in side.calls) for side in (baseline, candidate)]
    diff = ForwardDiff(
        n_calls=(n_calls[0], n_calls[1]),
        n_compared=len(common),
        order=tuple(baseline.order),
        same=all(repr(baseline.calls[key][1]) == repr(candidate.calls[key][1]) for key in common),  # NaN too
    )
    for fqn, strides in baseline.order.items():
        if strides != (others := candidate.order.get(fqn, strides)):
            diff = replace(diff, laid_out=(fqn, strides, others))
            break
    for key in common:
        one, other = baseline.calls[key], candidate.calls[key]
        if _same(one[0], other[0]) and not _same(one[1], other[1]):
            return replace(diff, block=key[0], in_baseline=one[2], in_candidate=other[2])
    of_model = [key for key in common if not key[0]]
    return replace(
        diff, other_inputs=any(not _same(baseline.calls[key][0], candidate.calls[key][0]) for key in of_model)
    )


def _description(module: nn.Module) -> str:
    """The module as text: `LayerNorm(16, eps=1e-05) in eval mode`. The class alone if the module has children."""
    own = "" if next(module.children(), None) is not None else f"({module.extra_repr()})"
    return f"{type(module).__name__}{own}{'' if module.training else ' in eval mode'}"


def _sketch(values: object) -> Sketch:
    return tuple(_of_tensor(leaf.detach()) for leaf in tensor_leaves(values))


def _of_tensor(tensor: Tensor) -> tuple[object, ...]:
    flat = in_double(tensor).flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    places = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64)
    projections = [float(torch.dot(flat, torch.cos(places * angle + angle))) for angle in (0.7, 2.3)]
    epsilon = torch.finfo(tensor.dtype).eps if is_floating(tensor) else 0.0
    return tuple(tensor.shape), tensor.dtype, epsilon, float(flat.norm()), *projections


def _same(left: Sketch, right: Sketch) -> bool:
    """Whether two sketches are equal up to rounding of at most _ROUNDS units in the last place."""
    return len(left) == len(right) and all(
        one[:2] == other[:2]
        and all(
            abs(a - b) <= min(_ROUNDS * one[2], math.sqrt(one[2])) * one[3] or a == b or a != a
            for a, b in zip(one[3:], other[3:])
        )
        for one, other in zip(left, right)
    )
