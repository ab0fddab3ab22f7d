"""The context of a recompute: what differs while a block runs again for backward.

The problem. A checkpointed block runs twice in one step: in forward, and again in backward to make what it did not
keep. The second run must compute exactly what the first run did and leave no trace, or training changes. torch
restores only its own generators for the second run. A BatchNorm moves its statistics twice (pytorch #96136), and the
generators of Python, numpy and the model move on.

The idea. The code that wraps a block (apply.py, segments) surrounds each second run with one context. The context is
made in forward, where it can still read the state of the generators.

The mechanism, on entry, undone in reverse order on exit:
1. Copies replace the running statistics: the second run moves the copies, which are then dropped.
2. Generators that torch does not stash return to their state at the forward; on exit they get their later state back.
3. `is_recomputing()` becomes true in the thread that recomputes; on CUDA this is autograd's thread, not the caller's.
4. Observers are called, because a block's own hooks stay silent when a policy calls its `forward` directly.
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

from explorer.engine.state.rng import OutsideRng
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
    """Calls `observer` whenever a recompute of a unit starts or ends, in any thread."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class RunningAgain:
    """Context in which `modules` run again. It can be entered repeatedly and inside itself: second order does both."""

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
        # 2. The current state is read first: the step outside of this block has drawn more numbers.
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
        # Early stop also ends here, by an exception of torch.
        for observer in reversed(tuple(_observers)):
            observer(self._fqn, False)
        _thread.depth -= 1
        hidden, stood = self._open.pop()
        if self._outside is not None and stood is not None:
            self._outside.write(stood)
        for module, name, real in hidden:
            module._buffers[name] = real


def running_again(block: nn.Module, fqn: str = "") -> RunningAgain:
    """The context for code that recomputes without torch.utils.checkpoint: `with running_again(block):`."""
    return RunningAgain((block,), fqn)


def _hide_statistics(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Replaces the statistics of BatchNorm and InstanceNorm by copies; exit puts the returned originals back."""
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
