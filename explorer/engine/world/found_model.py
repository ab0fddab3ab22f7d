"""Repeats steps of a model from its initial state, in place, because a copy of a compiled or sharded model differs.

Tensors are written back. A step works on copies of plain attributes, and the originals return at the end: an append to
a list of the model never reaches other holders of the list. State outside of the model stays moved. found_step.py
restores such state too, for steps that are not repeated in another type.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from explorer.engine.world.bits import storages
from explorer.engine.world.rng import RngState

_TORCHS = frozenset(vars(nn.Module())) | {"forward", "_call_impl", "_compiled_call_impl"}


class FoundModel:
    """Snapshot of a model on construction. Call `put_back` before every run; exit restores the model."""

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        """`modules` are the modules of `model` whose attributes are restored; a wrapper's attributes are not."""
        self._model = model
        self._tensors = [(tensor, tensor.data, tensor.grad) for tensor in (*model.parameters(), *model.buffers())]
        shared = {storage._cdata: storage for tensor, _, _ in self._tensors for storage in storages(tensor)}
        self._memory = [(storage, storage.clone()) for storage in shared.values()]
        self._held = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
        self._modes = [(module, module.training) for module in model.modules()]
        self._attributes = [(module, _plain(module)) for module in modules]
        self._rng = RngState.capture(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore([attributes for _, attributes in self._attributes])
        for tensor, _, grad in self._tensors:
            tensor.grad = grad

    def put_back(self, dtype: torch.dtype | None = None) -> None:
        """Restores the initial state without gradients; floating tensors are cast to `dtype` unless it is None."""
        self._restore(_copies([attributes for _, attributes in self._attributes], self._model))
        for tensor, _, _ in self._tensors:
            tensor.grad = None
            if dtype is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)

    def _restore(self, attributes: list[dict[str, Any]]) -> None:
        for module, parameters, buffers in self._held:
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
        for module, training in self._modes:
            module.training = training
        for (module, _), before in zip(self._attributes, attributes):
            for name in _plain(module).keys() - before.keys():
                delattr(module, name)
            vars(module).update(before)
        self._rng.restore()


class FoundOptimizer:
    """An optimizer that is about to step: from construction on, the optimizer works on a copy of its state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = dict(optimizer.state)
        self._groups = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
        self.put_back()

    def put_back(self) -> None:
        """Restores a copy of the initial state; floating tensors become float64 for parameters in float64."""
        self._restore({parameter: self._copy(parameter, held) for parameter, held in self._state.items()})

    def leave(self) -> None:
        """Gives the optimizer its original state objects back."""
        self._restore(self._state)

    def _restore(self, state: dict[Any, Any]) -> None:
        self._optimizer.state.clear()
        self._optimizer.state.update(state)
        for group, before in zip(self._optimizer.param_groups, self._groups):
            group.update(copy.deepcopy(before))

    @staticmethod
    def _copy(parameter: Any, held: Any) -> Any:
        copied = copy.deepcopy(held)
        if isinstance(copied, dict) and isinstance(parameter, Tensor) and parameter.dtype is torch.float64:
            wide = {name: value.double() for name, value in copied.items()
                    if isinstance(value, Tensor) and value.is_floating_point() and value.dim()}  # fmt: skip
            copied.update(wide)
        return copied


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _TORCHS}


def _copies(attributes: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
    """Deep copies that share objects as the originals do, with the model's own tensors and modules inside."""
    memo: dict[int, Any] = {id(part): part for part in (*model.modules(), *model.parameters(), *model.buffers())}
    return [{name: _copy(value, memo) for name, value in held.items()} for held in attributes]


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if type(value).__module__.partition(".")[0] == "torch" and not isinstance(value, (Tensor, torch.Generator)):
        return value  # handles, meshes, compiled functions: torch manages these
    if isinstance(value, torch.Generator):  # RngState captures the generator object itself
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # locks, handles, tensors of a graph cannot be copied
        return value
