"""What is different while a block runs again for backward.

1. `is_recomputing()` says so to whoever asks, in the thread that recomputes (on CUDA that is autograd's own).
2. Running statistics are hidden behind copies, so they move once per step, not once per forward (pytorch #96136).
3. Generators that torch does not stash are set back to where the forward found them, and afterwards returned.
4. Observers are told, because a block's own hooks stay silent when a policy runs its `forward` again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from explorer.engine.world.rng import OutsideRng
from explorer.record.policy import RunningStats

Observer = Callable[[str, bool], None]
"""Called with a unit's first fqn and True when it starts to run again, False when that ends; never in forward."""

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_thread = threading.local()
_observers: list[Observer] = []


def is_recomputing() -> bool:
    """True inside a block that runs again for backward, in the thread that runs it."""
    return bool(_running())


@contextmanager
def observe_recompute(observer: Observer) -> Iterator[None]:
    """Tells `observer` whenever a unit starts and ends running again, in whatever thread that happens."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class RunningAgain:
    """Context in which `modules` run again. Can be entered repeatedly and within itself: second order does both."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        fqn: str = "",
        *,
        running_stats: RunningStats = "once",
        outside: OutsideRng | None = None,
    ) -> None:
        self._modules = modules
        self._fqn = fqn
        self._hide = running_stats == "once"
        self._outside = outside
        self._at_forward = outside.read() if outside else None
        self._open: list[tuple[list[tuple[nn.Module, str, torch.Tensor]], Any]] = []

    def __enter__(self) -> Self:
        hidden = _hide_statistics(self._modules) if self._hide else []
        stood = None
        if self._outside is not None and self._at_forward is not None:
            stood = self._outside.read()
            self._outside.write(self._at_forward)
        self._open.append((hidden, stood))
        _running().append(self._fqn)
        for observer in tuple(_observers):
            observer(self._fqn, True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Early stop leaves through here too, by an exception of torch's own."""
        for observer in reversed(tuple(_observers)):
            observer(self._fqn, False)
        _running().pop()
        hidden, stood = self._open.pop()
        if self._outside is not None and stood is not None:
            self._outside.write(stood)
        for module, name, real in hidden:
            module._buffers[name] = real


def running_again(block: nn.Module, fqn: str = "") -> RunningAgain:
    """`with running_again(block):` for code that recomputes by its own hand."""
    return RunningAgain((block,), fqn)


def _running() -> list[str]:
    try:
        return _thread.units  # type: ignore[no-any-return]
    except AttributeError:
        units: list[str] = []
        _thread.units = units
        return units


def _hide_statistics(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """BatchNorm and InstanceNorm alike get copies to move; the real ones come back on exit."""
    hidden: list[tuple[nn.Module, str, torch.Tensor]] = []
    norms = {m: None for module in modules for m in module.modules() if isinstance(m, _NormBase)}
    for norm in norms:
        if not norm.track_running_stats:
            continue
        for name in _STATISTICS:
            real = norm._buffers.get(name)
            if real is not None:
                hidden.append((norm, name, real))
                norm._buffers[name] = real.clone()
    return hidden
