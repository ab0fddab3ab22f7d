"""Makes a run in float64 draw the random numbers that the run in the model's type draws.

A generator gives different numbers for each type: `rand_like` takes two words of the stream for float64, and one for
float32. A model that samples in the type of its activations needs this mode for a reference in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from explorer.engine.watch.uncompiled import DispatchMode

_DRAWS = frozenset({
    "aten::rand", "aten::randn", "aten::rand_like", "aten::randn_like", "aten::normal", "aten::normal_functional",
    "aten::uniform", "aten::exponential", "aten::log_normal", "aten::cauchy", "aten::geometric", "aten::multinomial",
    "aten::bernoulli",
})  # fmt: skip
"""Operators whose result is random numbers alone: a draw in a narrower type gives the same numbers, rounded."""


class SameDraws(DispatchMode):
    """Makes draws of float64 in `dtype` and widens them, between enter and exit."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name.removesuffix("_") not in _DRAWS:
            return func(*args, **kwargs)
        narrow = tuple(self._narrow(value) for value in args)
        options = {key: self._dtype if value is torch.float64 else self._narrow(value) for key, value in kwargs.items()}
        drawn = func(*narrow, **options)
        if name.endswith("_"):
            return args[0].copy_(drawn)
        wide = kwargs.get("dtype") is torch.float64 or any(_is_double(value) for value in args)
        return drawn.double() if wide and drawn.is_floating_point() else drawn

    def _narrow(self, value: Any) -> Any:
        return value.to(self._dtype) if _is_double(value) else value


def _is_double(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float64
