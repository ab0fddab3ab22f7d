"""Makes a run in float64 take the decisions of the run in the model's type: which ReLU passes, which number is largest.

An input within rounding of zero may decide otherwise in float64, and a whole gradient changes with it. In a small
ResNet, ten of 24 million decisions differed: the gradients lay 3e-3 of their norm away, a thousand times the rounding.
With equal decisions the gradients lie 2.5e-6 away, which is rounding. Other branches (ReLU6, sort) are not replayed.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from explorer.engine.watch.uncompiled import DispatchMode

_RELU = "aten::relu"
_MAX_POOL = "aten::max_pool2d_with_indices"


class Branches(DispatchMode):
    """Records decisions between enter and exit."""

    def __init__(self) -> None:
        super().__init__()
        self.decisions: deque[Tensor] = deque()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.removesuffix("_") == _RELU:
            self.decisions.append(out > 0)
        elif name == _MAX_POOL:
            self.decisions.append(out[1].clone())
        return out


class SameBranches(DispatchMode):
    """Replays and removes `decisions` in order between enter and exit. Raises IndexError after the last decision."""

    def __init__(self, decisions: deque[Tensor]) -> None:
        super().__init__()
        self._decisions = decisions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.removesuffix("_") == _RELU:
            passed = _passing(args[0], self._decisions.popleft())
            return args[0].copy_(passed) if name.endswith("_") else passed
        out = func(*args, **(kwargs or {}))
        if name == _MAX_POOL:
            largest = self._decisions.popleft()
            values = args[0].flatten(-2).gather(-1, largest.flatten(-2))
            return values.view_as(largest), largest
        return out


def _passing(x: Tensor, passes: Tensor) -> Tensor:
    """ReLU with given decisions. Passing elements stay above zero: backward reads the decisions from the result."""
    return torch.where(passes, x.clamp(min=torch.finfo(x.dtype).tiny), 0.0)
