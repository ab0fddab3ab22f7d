"""Refuses a model that would fill memory with real tensors while it is built and played without data.

without_data.py makes parameters fake when a module registers them. Tensors that come by another way are real: from
numpy or a file, as `empty_like` of a tensor on meta, or from an operator written in C++. The batch, masks and buffers
are real on purpose, because a model may read their values, so only large sums are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.multiprocessing.reductions import StorageWeakRef

from explorer.engine.device.memory_limit import available_bytes
from explorer.engine.state.bits import tensor_leaves
from explorer.engine.watch.lines import line_of_model
from explorer.engine.watch.modes import DispatchMode
from explorer.errors import ModelFailed
from explorer.plan.sizes import mib

LARGEST_SHARE = 0.5
"""Share of the free memory that real tensors may take."""
_SMALL_BYTES = 2**16
"""Smaller tensors are not counted: a look at each would take longer than the play."""


class RealBytes(DispatchMode):
    """Counts the bytes of all real tensors that operators make or read inside, while those tensors live."""

    def __init__(self, target: str) -> None:
        super().__init__()
        free = available_bytes()
        self._target, self._limit = target, None if free is None else int(LARGEST_SHARE * free)
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        read = tensor_leaves((args, kwargs))
        if self._limit is None:
            return func(*args, **kwargs)
        if "device" in kwargs and not any(map(is_fake, read)):
            self._refuse_beyond(self._bytes_of(func, args, kwargs))
        result = func(*args, **kwargs)
        for tensor in (*read, *tensor_leaves(result)):
            with suppress(Exception):  # a tensor without a storage of its own, as a sparse one
                self._count(tensor)
        self._refuse_beyond(0)
        return result

    @staticmethod
    def _bytes_of(func: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> int:
        """Bytes that a factory such as `ones` will return on the CPU, from a run on meta; 0 if there is none."""
        if not str(kwargs["device"] or "cpu").startswith("cpu"):
            return 0
        with suppress(Exception):
            made = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": False})
            return sum(tensor.nbytes for tensor in tensor_leaves(made))
        return 0

    def _count(self, tensor: object) -> None:
        if not isinstance(tensor, Tensor) or tensor.device.type != "cpu" or is_fake(tensor):
            return
        storage = tensor.untyped_storage()
        n_bytes, key = storage.nbytes(), storage._cdata
        if n_bytes < _SMALL_BYTES or (key in self._alive and not self._alive[key][0].expired()):
            return
        self._n_bytes += n_bytes - self._alive.get(key, (None, 0))[1]
        self._alive[key] = StorageWeakRef(storage), n_bytes

    def _refuse_beyond(self, more: int) -> None:
        """Raises ModelFailed if `more` bytes beside those alive pass the limit."""
        assert self._limit is not None
        if self._n_bytes + more <= self._limit:
            return
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self._n_bytes = sum(n_bytes for _, n_bytes in self._alive.values())
        if self._n_bytes + more <= self._limit:
            return
        place = f" at {line}" if (line := line_of_model()) else ""
        raise ModelFailed(
            f"{self._target} makes {mib(self._n_bytes + more)} of real tensors{place}, though it is played without "
            f"data: that is more than half of the free memory, {mib(2 * self._limit)}.",
            hint="Let nn.Parameter or nn.Module.to_empty make its weights, or measure a smaller build of it, by --set.",
        )
