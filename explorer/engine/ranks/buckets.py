"""Gradient buckets of DDP. Its reducer in C++ holds them, and no Python object leads there.

They are noticed at their allocation: the mode has to be on while DDP is made and takes its first steps.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from explorer.engine.watch.collectives import buffer_role
from explorer.engine.watch.storages import KnownTensor
from explorer.engine.watch.uncompiled import DispatchMode


class Buckets(DispatchMode):
    """Watches allocations between enter and exit."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        return self.noticed(func, func(*args, **(kwargs or {})))

    def noticed(self, func: object, out: Any) -> object:
        """The result of an operator, which may be a bucket."""
        is_buffer = func is torch.ops.aten.empty.memory_format and out.is_floating_point()
        if is_buffer and buffer_role() == "gradient bucket":
            self._storages.append(weakref.ref(out.untyped_storage()))
        return out

    def alive(self) -> list[KnownTensor]:
        """The buckets that DDP holds now."""
        storages = (reference() for reference in self._storages)
        return [KnownTensor(storage, "gradient bucket", "") for storage in storages if storage is not None]
