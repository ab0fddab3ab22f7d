"""Keeps saved activations on the host until backward: each tensor crosses once each way, however often it is saved.

    compute   ── block 0 ──┬── block 1 ──┬── ...          ── backward 1 ── wait, bring back ── backward 0 ──
    own stream             └─ copy out   └─ copy out

1. The copy out runs in a separate stream, into pinned memory; the tensor stays on the GPU until the copy is done.
2. An expanded tensor crosses unexpanded. Parameters stay where they are; on the CPU nothing moves, unless HOST has a
   stand-in: a measured step then copies as on a GPU (bench/host_stand_in.py).
3. The copy back runs in the stream that needs the tensor, which waits for the copy.
4. Sparse and nested tensors and tensors of subclasses such as DTensor stay: their bytes lie in other tensors.
5. torch does not check the version of a tensor that goes through hooks. `_Saved` does: without the check, backward
   would read what an operation in place wrote after the save.
Source: torch.autograd.graph.save_on_cpu, which also copies parameters and copies a tensor each time it is saved.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

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
        self._lock = threading.RLock()  # a garbage collection may delete an owner inside `_add`

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
    """A tensor on the host. Backward may ask for the tensor several times; a copy that is still alive is used again.

    Another stream brings a copy of its own: it could read the first one before it is there.
    """

    def __init__(self, back: Back, tensor: Tensor, n_bytes: int) -> None:
        self._back, self._shape, self._device = back, tensor.shape, tensor.device
        self._fake_mode: Any = getattr(tensor, "fake_mode", None)
        """Of a tensor without data, whose storage is on the device meta."""
        self._here: tuple[weakref.ref[Any], object, tuple[Any, ...]] | None = None
        """A weak reference to the copy's storage, its stream, and the tensor's type, offset, size and stride in it."""
        HOST.hold(self, n_bytes)

    def tensor(self) -> Tensor:
        stream = _stream(self._device)
        storage = self._here[0]() if self._here is not None and self._here[1] == stream else None
        if self._here is not None and storage is not None:
            dtype, *place = self._here[2]
            here = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)
            if self._fake_mode is not None:
                here = FakeTensor(self._fake_mode, here, self._device)
            return here.expand(self._shape)
        tensor = self._back()
        place = [tensor.storage_offset(), tensor.size(), tensor.stride()]
        self._here = weakref.ref(tensor.untyped_storage()), stream, (tensor.dtype, *place)
        return tensor.expand(self._shape)


class _Saved:
    """What autograd holds in place of a saved tensor: `on_host`, or the tensor itself if it stays on the device."""

    def __init__(self, tensor: Tensor, on_host: _OnHost | None = None) -> None:
        self._on_host, self._version = on_host, tensor._version
        self._bits = tensor.is_conj(), tensor.is_neg()
        with _disable_current_modes():  # these are no operators of the model
            # Detached, because an output and the operation that saves it would hold each other. Versions are shared.
            self._tensor = tensor.detach()
            if on_host is not None:
                self._tensor.data = tensor.new_empty(0)

    def tensor(self) -> Tensor:
        """The tensor on its device. Raises RuntimeError after a change in place, as autograd does without hooks."""
        here, version = self._tensor, self._tensor._version
        if self._on_host is not None:
            here = _with_bits(self._on_host.tensor(), *self._bits)
        if version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(here.shape)} of an offloaded block is at version {version}; expected version {self._version} "
                "instead. Everything kept, the step fails too: leave the operation out, or let it write into a clone."
            )
        return here


@contextmanager
def offload_saved(modules: Sequence[nn.Module], out: Out | None = None, name: str = "A block") -> Iterator[None]:
    """A context in which tensors that autograd saves move to the host. Parameters stay, those of `modules` in any view.

    Raises RuntimeError with the `name` of the block if torch.func refuses the context.
    """
    parameters = {
        parameter.untyped_storage()._cdata
        for module in modules
        for parameter in module.parameters()
        if _has_bytes_of_its_own(parameter)
    }
    copies: dict[object, tuple[weakref.ref[object], weakref.ref[_OnHost]]] = {}
    copy_out = out or to_host

    def pack(tensor: Tensor) -> _Saved:
        if not _has_bytes_of_its_own(tensor):
            return _Saved(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata in parameters or any(isinstance(owner, nn.Parameter) for owner in (tensor, tensor._base)):
            return _Saved(tensor)
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        owner, copy = copies.get(key, (None, None))
        on_host = copy() if copy is not None and owner is not None and owner() is storage else None
        if on_host is None:  # a new tensor, or an address that was handed out again
            small = _with_bits(unexpanded(tensor), False, False)
            back = copy_out(small)
            if back is None:
                return _Saved(tensor)
            on_host = _OnHost(back, tensor, small.nbytes)
            copies[key] = weakref.ref(storage), weakref.ref(on_host)
        return _Saved(tensor, on_host)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _Saved.tensor):
            yield
    except RuntimeError as error:
        if not any("saved tensor hooks" in str(part) for part in error.args):
            raise
        raise RuntimeError(
            f"{name} is offloaded and calls torch.func, which refuses saved tensor hooks, by which tensors move. "
            "Keep the block, or call torch.autograd.grad(..., create_graph=True) there."
        ) from error


def _with_bits(tensor: Tensor, is_conj: bool, is_neg: bool) -> Tensor:
    """The bytes of `tensor`, read as conjugated and negated or not.

    A tensor crosses without these bits: torch would apply them on the host, perhaps before the copy is there.
    """
    if tensor.is_conj() != is_conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() != is_neg else tensor


def _has_bytes_of_its_own(tensor: Tensor) -> bool:
    """False for sparse, nested and wrapped tensors and for parameters without a shape yet."""
    if tensor.layout != torch.strided or tensor.is_nested or is_traceable_wrapper_subclass(tensor):
        return False
    return not is_lazy(tensor)


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


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream in which this thread works now; None on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@functools.cache
def _lane(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def unexpanded(tensor: Tensor) -> Tensor:
    """The tensor narrowed to one element in each dimension of stride 0."""
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride())):
        if step == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
