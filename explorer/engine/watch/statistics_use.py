"""Whether a norm computes with its own running statistics while it moves them (batch renormalisation does).

A recompute finds them moved, so it computes with others. BatchNorm in training only writes them: that is no use. What
an operator makes of statistics is followed until it meets a value that wants a gradient; an update under no_grad, or
one that stays among values without gradients, never does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from explorer.engine.watch.moved_state import RUNNING_STATISTICS


class StatisticsUse:
    """Told of every operator of one forward."""

    def __init__(self, model: nn.Module) -> None:
        self._norms = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        self._before = {norm: _statistics(norm) for norm in self._norms}
        self._derived: dict[int, nn.Module] = {}
        """Storages that hold statistics or something made of them, by address."""
        for norm in self._norms:
            for name in RUNNING_STATISTICS[:2]:
                if (buffer := norm._buffers.get(name)) is not None:
                    self._derived[buffer.untyped_storage()._cdata] = norm
        self._used: set[nn.Module] = set()

    def ran(self, func: Any, args: Any, read: Sequence[Tensor], written: Sequence[Tensor], made: set[int]) -> None:
        """`made`: addresses of the storages that the operator made, which may have held something else before."""
        for address in made & self._derived.keys():
            del self._derived[address]
        if not self._derived or not torch.is_grad_enabled() or _only_updates(func, args):
            return
        norms = {self._derived[a] for tensor in read if (a := tensor.untyped_storage()._cdata) in self._derived}
        if not norms:
            return
        if any(tensor.requires_grad for tensor in read):
            self._used |= norms
        self._derived.update(dict.fromkeys(made, next(iter(norms))))

    def used(self) -> Iterator[nn.Module]:
        """Norms that computed with statistics and moved them."""
        return (norm for norm in self._norms if norm in self._used and self._before[norm] != _statistics(norm))


def _statistics(norm: nn.Module) -> list[tuple[int, int]]:
    return [(id(b), b._version) for name in RUNNING_STATISTICS if (b := norm._buffers.get(name)) is not None]


def _only_updates(func: Any, args: Any) -> bool:
    """The normalising operators of torch while they train: they write statistics and do not read them."""
    if "norm" not in str(func):
        return False
    training = [
        value
        for argument, value in zip(func._schema.arguments, args)
        if argument.name in ("training", "use_input_stats")
    ]
    return all(training)
