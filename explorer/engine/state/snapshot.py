"""Snapshots that put back what a run moves, each for one kind of run.

ModelSnapshot      judge, audit   in place, because a copy of a compiled or sharded model differs; also in another type
OptimizerSnapshot  judge, audit   an optimizer works on a copy of its state
StepSnapshot       auto_policy    all that a user's step can reach, bit by bit, in the objects that stand there
SharedSnapshot     compare        plain values on classes and in files, which all models of a process share
"""

from __future__ import annotations

import copy
import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from explorer.engine.state.bits import storages
from explorer.engine.state.reachable import (
    MAX_ITEMS,
    OF_TORCH_OR_POLICY,
    PLAIN,
    SharedNames,
    cells,
    instances_in_memory,
    is_own_function,
    is_own_module,
    items,
    names_in,
    reachable,
)
from explorer.engine.state.rng import RngState

_TORCHS = (nn.Module, Optimizer, LRScheduler, GradScaler)
_CONTAINERS = (dict, list, set, deque)


class ModelSnapshot:
    """Snapshot of a model on construction. Call `restore` before every run; exit restores the model.

    Tensors are written back. A step works on copies of plain attributes, and the originals return at the end: an
    append to a list of the model never reaches other holders of the list. State outside of the model stays moved.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        """`modules` are the modules of `model` whose attributes are restored; a wrapper's attributes are not."""
        self._model = model
        self._tensors = [(tensor, tensor.data, tensor.grad) for tensor in (*model.parameters(), *model.buffers())]
        shared = {storage._cdata: storage for tensor, _, _ in self._tensors for storage in storages(tensor)}
        self._memory = [(storage, storage.clone()) for storage in shared.values()]
        self._modules = [(m, dict(m._parameters), dict(m._buffers), m.training) for m in model.modules()]
        self._attributes = [(module, _plain(module)) for module in modules]
        self._rng = RngState.capture(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._write([attributes for _, attributes in self._attributes])
        for tensor, _, grad in self._tensors:
            tensor.grad = grad

    @property
    def is_replicated(self) -> bool:
        """Whether the model is, or has inside, a DistributedDataParallel."""
        return any(type(module).__name__ == "DistributedDataParallel" for module in self._model.modules())

    def shares(self, model: nn.Module) -> bool:
        """Whether `model` has a parameter or buffer of this one."""
        ids = {id(tensor) for tensor, _, _ in self._tensors}
        return any(id(tensor) in ids for tensor in (*model.parameters(), *model.buffers()))

    def restore(self, dtype: torch.dtype | None = None) -> None:
        """Restores the initial state without gradients; floating tensors are cast to `dtype` unless it is None."""
        self._write(_copies([attributes for _, attributes in self._attributes], self._model))
        for tensor, _, _ in self._tensors:
            tensor.grad = None
            if dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)

    def _write(self, attributes: list[dict[str, object]]) -> None:
        for module, parameters, buffers, training in self._modules:
            module.training = training
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor, data, _ in self._tensors:
            tensor.grad = None  # torch refuses to change the type of a tensor beside its gradient
            tensor.data = data
        for storage, content in self._memory:
            if storage.nbytes() != content.nbytes():
                storage.resize_(content.nbytes())
            storage.copy_(content)
        for (module, _), before in zip(self._attributes, attributes):
            for name in _plain(module).keys() - before.keys():
                delattr(module, name)
            vars(module).update(before)
        self._rng.restore()


class OptimizerSnapshot:
    """An optimizer that is about to step: from construction on, the optimizer works on a copy of its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = dict(optimizer.state)
        self._groups = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
        self.restore()

    def restore(self) -> None:
        """Restores a copy of the initial state; floating tensors become float64 for parameters in float64."""
        self._write({parameter: self._copy(parameter, state) for parameter, state in self._state.items()})

    def close(self) -> None:
        """Gives the optimizer its original state objects back."""
        self._write(self._state)

    def _write(self, state: dict[Any, object]) -> None:
        self._optimizer.state.clear()
        self._optimizer.state.update(state)
        for group, before in zip(self._optimizer.param_groups, self._groups):
            group.update(copy.deepcopy(before))

    @staticmethod
    def _copy(parameter: object, state: object) -> object:
        copied = copy.deepcopy(state)
        if isinstance(copied, dict) and isinstance(parameter, Tensor) and parameter.dtype is torch.float64:
            wide = {name: value.double() for name, value in copied.items()
                    if isinstance(value, Tensor) and value.is_floating_point() and value.dim()}  # fmt: skip
            copied.update(wide)
        return copied


def _plain(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name not in OF_TORCH_OR_POLICY}


def _copies(attributes: list[dict[str, object]], model: nn.Module) -> list[dict[str, object]]:
    """Deep copies that share objects as the originals do, with the model's own tensors and modules inside."""
    memo: dict[int, object] = {id(part): part for part in (*model.modules(), *model.parameters(), *model.buffers())}
    return [{name: _copy(value, memo) for name, value in names.items()} for names in attributes]


def _copy(value: object, memo: dict[int, object]) -> object:
    if type(value).__module__.partition(".")[0] == "torch" and not isinstance(value, Tensor):
        return value  # torch manages handles, meshes, compiled functions; RngState has the generators
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # locks, handles, tensors of a graph cannot be copied
        return value


class StepSnapshot:
    """Snapshot of a model, its optimizers and a step; `restore` may be called several times.

        step ─┬─ closure, defaults, globals that it names, the object it is bound to ─▶ own objects, lists, dictionaries
              └─ modules, optimizers, schedules, gradient scalers ─▶ parameters, gradients, buffers, state, settings

    1. The snapshot is on the host and outside of torch: a recorder sees no tensors, and a GPU holds nothing twice.
    2. Objects keep their identity: tensors are written into, containers are refilled.
    3. A tensor that no torch object holds (a batch, a data set) counts as read-only.

    Not restored: numpy arrays, the position of iterators, files, and slots.
    """

    def __init__(self, model: nn.Module, step: Callable[[], object]) -> None:
        self._rng = RngState.capture(model)
        objects = reachable((model, *optimizers_of(model), step), _parts)
        of_torch = reachable((part for part in objects if isinstance(part, _TORCHS)), _parts_outside_functions)
        tensors = {id(part): part for part in of_torch if isinstance(part, Tensor)}
        tensors |= {id(p): p for p in objects if isinstance(p, Tensor) and p.is_leaf and p.requires_grad}
        self._tensors = [(tensor, _Bits(tensor)) for tensor in tensors.values()]
        leaves = [tensor for tensor in tensors.values() if tensor.is_leaf]
        self._gradients = [(leaf, None if leaf.grad is None else _Bits(leaf.grad)) for leaf in leaves]
        self._containers = [(part, part.copy()) for part in objects if _is_refilled(part)]
        functions = [part for part in objects if isinstance(part, types.FunctionType) and is_own_function(part)]
        self._cells = [cell for function in functions for cell in cells(function)]
        self._globals = [name for function in functions for name in _globals(function)]

    def restore(self) -> None:
        """Restores parameters, gradients, buffers, optimizer state, generators, and plain values around them."""
        with torch.no_grad():
            for tensor, bits in self._tensors:
                bits.write_into(tensor)
            for parameter, gradient in self._gradients:
                _set_gradient(parameter, gradient)
        for container, image in self._containers:
            _refill(container, image)
        for cell, content in self._cells:
            cell.cell_contents = content
        for file, name, value in self._globals:
            if file.get(name) is not value:
                file[name] = value
        self._rng.restore()


def held_by(functions: Iterable[object]) -> list[Any]:
    """Every object that functions hold: bound, closed over, in a partial, or in a global that they name."""
    return reachable(functions, _parts)


def _parts(value: object) -> list[object]:
    """What a walk from a step enters: own objects and torch's, never those of other libraries."""
    parts: Iterable[object] = ()
    if isinstance(value, _CONTAINERS):
        parts = items(value) or () if _is_refilled(value) else ()
    elif isinstance(value, (tuple, frozenset)):
        parts = value
    elif isinstance(value, partial):
        parts = (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        parts = (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        if is_own_function(value):
            contents = [content for _, content in cells(value)]
            names = [content for _, _, content in _globals(value)]
            parts = (value.__defaults__, value.__kwdefaults__, vars(value), *contents, *names)
    elif isinstance(value, _TORCHS):
        parts = (vars(value),)
    elif (
        type(value) is types.SimpleNamespace or is_own_module(type(value).__module__) and not isinstance(value, Tensor)
    ):
        called = (type(value).__call__,) if callable(value) else ()
        parts = (getattr(value, "__dict__", None), *called)
    return [part for part in parts if not isinstance(part, (types.ModuleType, type, np.ndarray))]


def _parts_outside_functions(value: object) -> list[object]:
    return [] if isinstance(value, types.FunctionType) else _parts(value)


def _globals(function: types.FunctionType) -> Iterator[tuple[dict[str, object], str, object]]:
    file = function.__globals__
    yield from ((file, name, file[name]) for name in names_in(function.__code__) if name in file)


def _is_refilled(value: object) -> bool:
    return isinstance(value, _CONTAINERS) and len(value) <= MAX_ITEMS


def optimizers_of(model: nn.Module, objects: Sequence[object] | None = None) -> list[Optimizer]:
    """The optimizers among `objects` that step a parameter of the model. None: among all objects in memory."""
    ids = {id(parameter) for parameter in model.parameters()}
    optimizers = []
    for part in instances_in_memory(Optimizer) if objects is None else objects:
        if isinstance(part, Optimizer):
            stepped = {id(parameter) for group in part.param_groups for parameter in group["params"]}
            if not ids.isdisjoint(stepped):
                optimizers.append(part)
    return optimizers


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

    def fits(self, tensor: Tensor) -> bool:
        like = self.like
        return (tensor.shape, tensor.dtype, tensor.layout) == (like.shape, like.dtype, like.layout)

    def new_tensor(self, device: torch.device) -> Tensor:
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
        parameter.grad = before.new_tensor(parameter.device)


def _refill(container: Any, image: Any) -> None:
    """Restores the items of a container, if any item is another object than before."""
    now, then = ([*part, *part.values()] if isinstance(part, dict) else part for part in (container, image))
    if len(now) == len(then) and all(map(operator.is_, now, then)):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(image)
    else:
        container.extend(image)


class SharedSnapshot:
    """Plain values that `model` shares with other models; call `restore` before each run.

    A factory that builds a new model does not reset such values, so two runs would differ. A container that a run
    changes in place is not put back; the comparison names it as unstable.
    """

    def __init__(self, model: nn.Module) -> None:
        shared = [(name, name.value) for name in SharedNames(model)]
        self._values = [(name, value) for name, value in shared if isinstance(value, PLAIN)]

    def restore(self) -> None:
        for name, value in self._values:
            if name.value is not value:
                name.set(value)
