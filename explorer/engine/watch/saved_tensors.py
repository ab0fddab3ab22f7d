"""Notes each tensor that autograd saves in a step, when backward reads it, and when autograd lets go of it.

A timeline shows until when a storage lives, and not which operations wait for it. A forecast of offload needs both.
forward.py looks at saved tensors too, without a backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import time_ns

import numpy as np
import torch
from torch import Tensor
from torch._C import _autograd

from explorer.engine.device.allocator import Ints
from explorer.engine.watch.scopes import is_tracing, without_operation
from explorer.engine.watch.storages import NONE
from explorer.engine.watch.tracker import Tracker
from explorer.record.allocations import Saves
from explorer.record.base import column

READ, RELEASED = -2, -1


class _Saved:
    """What autograd holds for a saved tensor: nothing else refers to it."""

    def __init__(self, tensor: Tensor, row: list[int]) -> None:
        self.tensor, self.row = tensor, row

    def __del__(self) -> None:
        self.row[RELEASED] = time_ns()


class SavedTensors:
    """The saved tensors of the step that `tracker` watches."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._rows: list[list[int]] = []
        """Storage, block, view, bytes, and the times at which the tensor is saved, read and released."""
        self._views: dict[object, int] = {}
        self._is_read_twice = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches inside. torch.func refuses hooks on saved tensors: they step aside while it runs."""
        graph, disable = torch.autograd.graph, torch.autograd.graph.disable_saved_tensors_hooks

        @contextmanager
        def stepping_aside(message: str) -> Iterator[None]:
            is_outermost = _autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
            if is_outermost:
                _autograd._pop_saved_tensors_default_hooks()
            try:
                with disable(message):
                    yield
            finally:
                if is_outermost:
                    _autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

        graph.disable_saved_tensors_hooks = stepping_aside  # type: ignore[assignment]
        try:
            with graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            graph.disable_saved_tensors_hooks = disable

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        tracker, detached = self._tracker, tensor if is_tracing() else without_operation(tensor)
        numbers = [] if is_tracing() or tracker.is_aside else tracker.storages.of(tensor)
        if len(numbers) != 1:
            return detached
        shape, stride = tuple(tensor.shape), tensor.stride()
        view = (numbers[0], tensor.storage_offset(), shape, stride, tensor.dtype, tensor._version)
        n_bytes = tensor.element_size()
        for size, step in zip(shape, stride):
            n_bytes *= size if step else min(size, 1)
        number = self._views.setdefault(view, len(self._views))
        block = tracker.scopes.frame.stack[-1]
        self._rows.append([numbers[0], block, number, n_bytes, time_ns(), NONE, NONE])
        return _Saved(detached, self._rows[-1])

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved
        self._is_read_twice |= saved.row[READ] != NONE
        saved.row[READ] = time_ns()
        return saved.tensor

    def record(self, tick_ns: Ints, entry_of: Ints) -> Saves:
        """The rows on a timeline, as `CallLog.record`; none if a backward runs twice: no reading is then the last."""
        rows = [] if self._is_read_twice else self._rows
        names = Saves.__struct_fields__
        table = np.array(rows, dtype=np.int64).reshape(-1, len(names))
        table[:, 0] = entry_of[table[:, 0]]
        times = table[:, READ - 1 :]
        ticks = np.searchsorted(tick_ns, times, side="right")
        times[:] = np.where(times == NONE, len(tick_ns) + 1, ticks)
        entries = table[table[:, 0] != NONE]
        return Saves(**{name: column(values.tolist()) for name, values in zip(names, entries.T)})
