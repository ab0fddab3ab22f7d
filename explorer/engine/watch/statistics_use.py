"""Finds norms that compute with their running statistics while they move them (batch renormalisation does).

A recompute would compute with the moved statistics. BatchNorm in training only writes statistics, which is no use.
Results made from statistics are followed until an operator combines them with a value that requires a gradient. An
update under no_grad, or among values without gradients, never gets there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from explorer.engine.watch.state_changes import RUNNING_STATISTICS


class StatisticsUse:
    """Follows running statistics through the operators of one forward."""

    def __init__(self, model: nn.Module) -> None:
        self._norms = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        self._before = {norm: _statistics(norm) for norm in self._norms}
        self._derived: dict[int, nn.Module] = {}
        """Norms by address of storages with their statistics or results of the statistics."""
        for norm in self._norms:
            for name in RUNNING_STATISTICS[:2]:
                if (buffer := norm._buffers.get(name)) is not None:
                    self._derived[buffer.untyped_storage()._cdata] = norm
        self._used: set[nn.Module] = set()

    def ran(self, func: Any, args: Any, read: Sequence[Tensor], written: Sequence[Tensor], made: set[int]) -> None:
        """Notes an operator. `made` are the addresses of its new storages; older storages may have had them."""
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
        """Norms that computed with their statistics and moved them."""
        return (norm for norm in self._norms if norm in self._used and self._before[norm] != _statistics(norm))


def _statistics(norm: nn.Module) -> list[tuple[int, int]]:
    return [(id(b), b._version) for name in RUNNING_STATISTICS if (b := norm._buffers.get(name)) is not None]


def _only_updates(func: Any, args: Any) -> bool:
    """Whether `func` is a normalising operator of torch in training, which writes statistics but does not read them."""
    if "norm" not in str(func):
        return False
    training = [
        value
        for argument, value in zip(func._schema.arguments, args)
        if argument.name in ("training", "use_input_stats")
    ]
    return all(training)
