"""Snapshot of all state that a user's step can reach, restored bit by bit.

    step ─┬─ closure, defaults, globals that it names, the object it is bound to ─▶ own objects, lists, dictionaries
          └─ modules, optimizers, schedules, gradient scalers ─▶ parameters, gradients, buffers, state, settings

1. The snapshot is on the host and outside of torch: a recorder sees no tensors, and a GPU holds nothing twice.
2. Objects keep their identity: tensors are written into, containers are refilled.
3. A tensor that no torch object holds (a batch, a data set) counts as read-only.

Not put back: numpy arrays, the position of iterators, files, and slots of classes of installed libraries.
"""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from explorer.engine.world.bits import storages
from explorer.engine.world.kept_inside import is_own_function, is_own_module
from explorer.engine.world.rng import RngState
from explorer.engine.world.spoken_of import names_in

_TORCHS = (nn.Module, Optimizer, LRScheduler, GradScaler)
_CONTAINERS = (dict, list, set, deque)
_NOT_WALKED = (types.ModuleType, type, str, bytes, int, float, complex, np.ndarray)
_MAX_ITEMS = 100_000
_MAX_THINGS = 200_000


class FoundState:
    """Snapshot of a model, its optimizers and a step; `put_back` may be called several times."""

    def __init__(self, model: nn.Module, step: Callable[[], object]) -> None:
        self._rng = RngState.capture(model)
        self._known: set[int] = set()
        self._tensors: dict[int, tuple[Tensor, _Bits]] = {}
        self._gradients: dict[int, tuple[Tensor, _Bits | None]] = {}
        self._containers: list[tuple[Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        for root in (model, *optimizers_of(model), step):
            self._walk(root)

    def put_back(self) -> None:
        """Restores parameters, gradients, buffers, optimizer state, generators, and plain values around them."""
        with torch.no_grad():
            for tensor, bits in self._tensors.values():
                bits.write_into(tensor)
            for parameter, gradient in self._gradients.values():
                _set_gradient(parameter, gradient)
        for container, image in self._containers:
            _refill(container, image)
        for cell, content in self._cells:
            cell.cell_contents = content
        for namespace, name, value in self._globals:
            if namespace.get(name) is not value:
                namespace[name] = value
        self._rng.restore()

    def _walk(self, root: object) -> None:
        """Visits every object reachable from `root` once; the tensors of torch's objects are kept as bits."""
        left: list[tuple[object, bool]] = [(root, False)]
        while left and len(self._known) < _MAX_THINGS:
            thing, is_torchs = left.pop()
            if isinstance(thing, Tensor):
                self._keep_tensor(thing, of_torch=is_torchs)
            elif id(thing) not in self._known and not isinstance(thing, _NOT_WALKED):
                self._known.add(id(thing))
                is_torchs = isinstance(thing, _TORCHS) or (is_torchs and not isinstance(thing, types.FunctionType))
                left += [(part, is_torchs) for part in self._parts(thing)]

    def _keep_tensor(self, tensor: Tensor, *, of_torch: bool) -> None:
        if id(tensor) not in self._tensors and (of_torch or (tensor.is_leaf and tensor.requires_grad)):
            self._tensors[id(tensor)] = tensor, _Bits(tensor)
            if tensor.is_leaf:
                self._gradients[id(tensor)] = tensor, None if tensor.grad is None else _Bits(tensor.grad)

    def _parts(self, thing: Any) -> Iterator[object]:
        if isinstance(thing, _CONTAINERS):
            yield from self._held_by(thing)
        elif isinstance(thing, (tuple, frozenset)):
            yield from thing
        elif isinstance(thing, partial):
            yield from (thing.func, thing.args, thing.keywords)
        elif isinstance(thing, types.MethodType):
            yield from (thing.__func__, thing.__self__)
        elif isinstance(thing, types.FunctionType):
            if is_own_function(thing):
                yield from self._of_function(thing)
        elif isinstance(thing, _TORCHS) or _holds_data(type(thing)):
            yield getattr(thing, "__dict__", None)
            if callable(thing) and not isinstance(thing, _TORCHS):
                yield type(thing).__call__

    def _held_by(self, container: Any) -> Iterator[object]:
        if len(container) > _MAX_ITEMS:
            return
        self._containers.append((container, container.copy()))
        yield from container.values() if isinstance(container, dict) else container

    def _of_function(self, function: types.FunctionType) -> Iterator[object]:
        yield from (function.__defaults__, function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self._cells.append((cell, cell.cell_contents))
            except ValueError:  # still empty
                continue
            yield cell.cell_contents
        for name in names_in(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                self._globals.append((function.__globals__, name, value))
                yield value


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Every optimizer in memory that steps a parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), Optimizer)
        and any(id(parameter) in own for group in thing.param_groups for parameter in group["params"])
    ]


@dataclass(slots=True, init=False)
class _Bits:
    """A tensor's bytes and form; a copy of a tensor without plain memory."""

    bytes_: NDArray[np.uint8] | None
    like: Tensor
    """A tensor of the same form without memory; a copy if `bytes_` is None."""
    memory: list[tuple[torch.UntypedStorage, torch.UntypedStorage]]
    """Storages of a tensor that no kernel can write, each with a copy of its content."""

    def __init__(self, tensor: Tensor) -> None:
        detached = tensor.detach()
        self.memory = []
        if type(detached) is Tensor and _is_not_written(detached):
            self.bytes_, self.like = None, detached
            self.memory = [(storage, storage.clone()) for storage in storages(detached)]
            return
        if type(detached) is not Tensor or detached.layout is not torch.strided or detached.device.type == "meta":
            self.bytes_, self.like = None, detached.clone()
            return
        flat = detached.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        self.bytes_ = np.array(flat.view(torch.uint8).numpy(), copy=True)
        self.like = torch.empty_strided(detached.shape, detached.stride(), dtype=detached.dtype, device="meta")

    def write_into(self, tensor: Tensor) -> None:
        for storage, content in self.memory:
            storage.copy_(content)
        if self.bytes_ is None:
            if not self.memory:
                tensor.copy_(self.like)
        elif self.bytes_.size:
            tensor.copy_(torch.from_numpy(self.bytes_).view(self.like.dtype).reshape(self.like.shape))

    def fits(self, tensor: Tensor | None) -> bool:
        return tensor is not None and (tensor.shape, tensor.dtype, tensor.layout) == (
            self.like.shape,
            self.like.dtype,
            self.like.layout,
        )

    def made(self, device: torch.device) -> Tensor:
        """A new tensor with the kept bytes."""
        if self.bytes_ is None:
            return self.like.clone()
        tensor = torch.empty_strided(self.like.shape, self.like.stride(), dtype=self.like.dtype, device=device)
        self.write_into(tensor)
        return tensor


def _is_not_written(tensor: Tensor) -> bool:
    """Whether no kernel can write the tensor: quantised, nested, or expanded (elements share memory)."""
    return tensor.is_quantized or tensor.is_nested or (tensor.layout is torch.strided and 0 in tensor.stride())


def _set_gradient(parameter: Tensor, before: _Bits | None) -> None:
    gradient = parameter.grad
    if before is None:
        parameter.grad = None
    elif gradient is not None and before.fits(gradient) and before.bytes_ is not None:
        before.write_into(gradient)
    else:
        parameter.grad = before.made(parameter.device)


def _refill(container: Any, image: Any) -> None:
    """Restores the items of a container, if any item is another object than before."""
    now, then = (list(one.items()) if isinstance(one, dict) else list(one) for one in (container, image))
    if len(now) == len(then) and all(_is_same(one, other) for one, other in zip(now, then)):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(image)
    else:
        container.extend(image)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:
        return one[0] is other[0] and one[1] is other[1]
    return one is other


def _holds_data(kind: type) -> bool:
    return kind is types.SimpleNamespace or is_own_module(kind.__module__)
