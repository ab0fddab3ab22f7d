"""Lets a run in float64 decide as the run in the model's own type did: which ReLU passes, which number is largest.

Where an input lies within rounding of zero, float64 may decide otherwise, and a whole gradient comes or goes with it:
of 24 million decisions of a small ResNet ten came out otherwise, and its gradients lay 3e-3 of their norm away, a
thousand times what rounding does. Decided alike they lie 2.5e-6 away, which is rounding, and what a reference is for.
Other branches (a ReLU6, a sort) are not followed.
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
    """While it is entered, decisions are noted."""

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
    """While it is entered, `decisions` are used up in the order they were made. Raises IndexError beyond the last."""

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
    """What passes stays above zero: backward asks the result where gradients flow."""
    return torch.where(passes, x.clamp(min=torch.finfo(x.dtype).tiny), 0.0)
