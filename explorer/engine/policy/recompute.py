"""What is different while a block runs again for backward.

The problem. A checkpointed block runs twice in one step: in forward, and again in backward to make what it did not
keep. The second run must compute exactly what the first one did, and must leave no trace, or training changes. torch
puts its own generators back for the second run, and nothing else: a BatchNorm moves its statistics twice
(pytorch #96136), Python's and numpy's dice and generator objects roll on.

The idea. Whoever wraps a block (apply.py, segments) surrounds each second run with one context, made in forward, where
it can still read how things stood.

The mechanism, on entry, undone in reverse order on exit:
1. Running statistics are hidden behind copies: the second run moves the copies, which are then dropped.
2. Generators that torch does not stash go back to where the forward found them, and afterwards on from where they were.
3. `is_recomputing()` becomes true in the thread that recomputes; on CUDA that is autograd's own, not the caller's.
4. Observers are told, because a block's own hooks stay silent when a policy calls its `forward` directly.
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
    return getattr(_thread, "depth", 0) > 0


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
        # 1.
        hidden = _hide_statistics(self._modules) if self._hide else []
        # 2. Where they stand now is read first: outside of this block the step has gone on drawing.
        stood = None
        if self._outside is not None and self._at_forward is not None:
            stood = self._outside.read()
            self._outside.write(self._at_forward)
        # A stack, because one block can run again while it runs again: second order, nested checkpoints.
        self._open.append((hidden, stood))
        # 3. and 4.
        _thread.depth = getattr(_thread, "depth", 0) + 1
        for observer in tuple(_observers):
            observer(self._fqn, True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Early stop leaves through here too, by an exception of torch's own.
        for observer in reversed(tuple(_observers)):
            observer(self._fqn, False)
        _thread.depth -= 1
        hidden, stood = self._open.pop()
        if self._outside is not None and stood is not None:
            self._outside.write(stood)
        for module, name, real in hidden:
            module._buffers[name] = real


def running_again(block: nn.Module, fqn: str = "") -> RunningAgain:
    """`with running_again(block):` for code that recomputes by its own hand."""
    return RunningAgain((block,), fqn)


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
