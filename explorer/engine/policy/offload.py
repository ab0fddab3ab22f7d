"""Keeps saved activations on the host until backward: each tensor crosses once each way, however often it is saved.

    compute   ── block 0 ──┬── block 1 ──┬── ...          ── backward 1 ── wait, bring back ── backward 0 ──
    own stream             └─ copy out   └─ copy out

1. The copy out runs in a separate stream, into pinned memory; the tensor stays on the GPU until the copy is done.
2. An expanded tensor crosses unexpanded. Parameters stay where they are; on the CPU nothing moves, unless HOST has a
   stand-in: a measured step then copies as on a GPU (bench/host_stand_in.py).
3. The copy back runs in the stream that needs the tensor, which waits for the copy.
Source: torch.autograd.graph.save_on_cpu, which also copies parameters and copies a tensor each time it is saved.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

Back = Callable[[], Tensor]
Out = Callable[[Tensor], Back | None]
"""Starts the copy of a tensor to the host and returns the function that brings it back; None if the tensor stays."""


class HostBytes:
    """Bytes that offloaded tensors hold on the host now, and their peak since `restart`."""

    def __init__(self) -> None:
        self.stand_in: Out = lambda tensor: None
        """Copies a tensor that is on no GPU."""
        self.peak_bytes = 0
        self._now = 0
        self._lock = threading.Lock()

    def restart(self) -> None:
        self.peak_bytes = self._now

    def hold(self, owner: object, n_bytes: int) -> None:
        """Counts `n_bytes` until `owner` is deleted."""
        self._add(n_bytes)
        weakref.finalize(owner, self._add, -n_bytes).atexit = False

    def _add(self, n_bytes: int) -> None:
        with self._lock:
            self._now += n_bytes
            self.peak_bytes = max(self.peak_bytes, self._now)


HOST = HostBytes()


class _OnHost:
    """A tensor on the host. Backward may ask for the tensor several times; a copy that is still alive is used again."""

    def __init__(self, back: Back, shape: torch.Size, n_bytes: int) -> None:
        self._back, self._shape = back, shape
        self._here: tuple[weakref.ref[Any], tuple[Any, ...]] | None = None
        """A weak reference to the storage of the copy, and the tensor's type, offset, size and stride in it."""
        HOST.hold(self, n_bytes)

    def tensor(self) -> Tensor:
        if self._here is not None and (storage := self._here[0]()) is not None:
            dtype, *place = self._here[1]
            return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place).expand(self._shape)
        tensor = self._back()
        place = [tensor.storage_offset(), tensor.size(), tensor.stride()]
        self._here = weakref.ref(tensor.untyped_storage()), (tensor.dtype, *place)
        return tensor.expand(self._shape)


def offload_saved(modules: Sequence[nn.Module], out: Out | None = None) -> AbstractContextManager[object]:
    """A context in which tensors that autograd saves move to the host. Parameters of `modules` stay."""
    parameters = {parameter.untyped_storage()._cdata for module in modules for parameter in module.parameters()}
    copies: dict[object, tuple[weakref.ref[object], weakref.ref[_OnHost]]] = {}
    copy_out = out or to_host

    def pack(tensor: Tensor) -> Tensor | _OnHost:
        storage = tensor.untyped_storage()
        if storage._cdata in parameters:
            return tensor
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        owner, copy = copies.get(key, (None, None))
        on_host = copy() if copy is not None and owner is not None and owner() is storage else None
        if on_host is None:  # a new tensor, or an address that was handed out again
            small = unexpanded(tensor)
            back = copy_out(small)
            if back is None:
                return tensor.detach()  # an output and the operation that saves it would hold each other in a cycle
            on_host = _OnHost(back, tensor.shape, small.nbytes)
            copies[key] = weakref.ref(storage), weakref.ref(on_host)
        return on_host

    def unpack(packed: Tensor | _OnHost) -> Tensor:
        return packed.tensor() if isinstance(packed, _OnHost) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def to_host(tensor: Tensor) -> Back | None:
    """Copies a GPU tensor to the host, after all work queued in its stream; another tensor by `HOST.stand_in`."""
    if tensor.device.type != "cuda":
        return HOST.stand_in(tensor)
    device, lane = tensor.device, _lane(tensor.device)
    pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
    lane.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(lane):
        pinned.copy_(tensor, non_blocking=True)
        copied = lane.record_event()
    tensor.record_stream(lane)

    def back() -> Tensor:
        torch.cuda.current_stream(device).wait_event(copied)
        return pinned.to(device, non_blocking=True)

    return back


@functools.cache
def _lane(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def unexpanded(tensor: Tensor) -> Tensor:
    """The tensor narrowed to one element in each dimension of stride 0."""
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride())):
        if step == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
