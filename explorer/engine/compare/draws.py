"""Compares the random numbers of a forward with those of its recompute, module by module.

A dispatch mode sees each random operation; the stack of running blocks gives its block. Draws are paired by call: a
recompute belongs to the latest forward of its unit that has no recompute yet, because backward runs in reverse.

    forward     A₁ B₁ A₂          A called twice
    recompute          A₂ B₁ A₁

The compared runs do not use this mode, because a dispatch mode may change torch's choice of kernels.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from explorer.engine.watch.scopes import BlockWatch, Frame
from explorer.record.comparison import MaskDiff
from explorer.record.policy import Policy

_MASKS = (torch.ops.aten.bernoulli_, torch.ops.aten.bernoulli)
_WITH_MASK = (torch.ops.aten.native_dropout, torch.ops.aten._fused_dropout)


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


class DrawWatch(BlockWatch):
    """Collects draws inside the units of a policy while it is entered; `masks` holds the result."""

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        segments = [unit.blocks[0] for unit in policy.units if len(unit.blocks) > 1]
        super().__init__(model, segments=segments)
        index = self.scopes.index
        self._last = {index[unit.blocks[0]]: index[unit.blocks[-1]] for unit in policy.units}
        self._segments = {index[fqn] for fqn in segments}
        self._open: list[_Call] = []
        self._waiting: dict[int, list[_Call]] = defaultdict(list)
        self._found: dict[str, MaskDiff] = {}

    @property
    def masks(self) -> tuple[MaskDiff, ...]:
        """One entry for each block that drew inside a recomputed unit, in the order of the model."""
        return tuple(sorted(self._found.values(), key=lambda mask: self.scopes.index[mask.block]))

    def entered(self, block: int, frame: Frame, inputs: Any) -> None:
        again = bool(frame.reruns) and frame.reruns[-1] == block
        if block in self._last and not (again and block in self._segments):
            self._open.append(_Call(block, self._last[block], again))

    def left(self, block: int, frame: Frame, output: Any) -> None:
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._open and torch.Tag.nondeterministic_seeded in func.tags:
            drawn = random_numbers(func, args, kwargs or {}, result)
            if drawn is not None:
                for call in self._open:
                    call.draws[self.running].append(drawn)
        return result

    def _compare(self, forward: _Call, again: _Call) -> None:
        for block, draws in forward.draws.items():
            repeats = again.draws[block]
            pairs = list(zip(draws, repeats))
            so_far = self._found.get(block, MaskDiff(block=block, n_elements=0, n_mismatched=0))
            self._found[block] = MaskDiff(
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
    kind = func.overloadpacket
    if kind in _WITH_MASK:
        return result[1].bool()
    if kind in _MASKS:
        return result != 0
    if "scaled_dot_product" in func.name():
        # Fused attention draws its mask inside the kernel: equal inputs and an equal mask give an equal output.
        return result[0].detach().clone() if _argument(func, args, kwargs, "dropout_p") else None
    return result.detach().clone() if isinstance(result, Tensor) else None


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The value of the argument `name` of `func`, by position or keyword, else its default."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[i] if i < len(args) else kwargs.get(name, argument.default_value)
    return None
