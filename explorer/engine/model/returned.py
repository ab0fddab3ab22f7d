"""Conversion of a factory's result into a model with a batch and a loss. A factory may return:

model                                  the batch is made to fit (example_batch.py)
(model, inputs)
(model, (inputs, targets), loss)       loss(output, targets): the mean over the batch
(model, step)                          step(model) has its own batch and returns the loss
{"model": ..., "inputs": ..., "targets": ..., "loss": ...} or an object with these attributes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from explorer.engine.model.example_batch import BatchShape, example_batch
from explorer.engine.model.loaded import Loaded, OwnStep
from explorer.errors import ModelNotLoaded
from explorer.record.graph import ModelRef

_WAYS = "Return the model, (model, inputs), (model, (inputs, targets), loss_function) or (model, step)."
_PARTS = ("model", "inputs", "targets", "loss")


def unpacked(ref: ModelRef, built: Any, shape: BatchShape) -> Loaded:
    """The model, batch and loss of `built`. Raises ModelNotLoaded, with the kind of `built`, for other results."""
    if (parts := _named(built)) is not None:
        return _from_parts(ref, parts, shape)
    model, batch, loss = built, None, None
    if isinstance(built, (tuple, list)):
        model, batch, loss = (*built, None, None)[:3] if 1 <= len(built) <= 3 else (None, None, None)
    if not isinstance(model, nn.Module):
        raise ModelNotLoaded(
            f"The factory of {ref.target} returned {_kind(built)}, not a model.",
            hint=_WAYS,
        )
    if batch is None:
        return Loaded(ref, model, example_batch(model, ref.target, shape), None, loss)
    if loss is None:
        if callable(batch) and not isinstance(batch, torch.Tensor):
            return Loaded(ref, model, OwnStep(batch), None, _its_own)
        return Loaded(ref, model, batch, None, None)
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2) or not callable(loss):
        raise ModelNotLoaded(
            f"The factory of {ref.target} returned a loss function, but its batch is not a pair (inputs, targets).",
            hint="Return (model, (inputs, targets), loss_function) with loss_function(output, targets).",
        )
    return Loaded(ref, model, batch[0], batch[1], loss)


def _its_own(output: Any, targets: Any) -> Any:
    """The output itself: a step returns its loss."""
    return output


def _named(built: Any) -> Mapping[str, Any] | None:
    """The parts of a dict, a dataclass or a named tuple; None for other results."""
    if isinstance(built, Mapping):
        return built
    if dataclasses.is_dataclass(built) and not isinstance(built, (type, nn.Module)) or hasattr(built, "_asdict"):
        return {name: getattr(built, name) for name in _PARTS if hasattr(built, name)}
    return None


def _from_parts(ref: ModelRef, parts: Mapping[str, Any], shape: BatchShape) -> Loaded:
    model = parts.get("model")
    strangers = [str(name) for name in parts if name not in _PARTS]
    if not isinstance(model, nn.Module) or strangers:
        fault = f"has {', '.join(map(str, parts))}" if parts else "is empty"
        raise ModelNotLoaded(
            f"What the factory of {ref.target} returned {fault}; its parts are {', '.join(_PARTS)}.",
            hint="Only `model` has to be there.",
        )
    inputs = parts.get("inputs")
    inputs = example_batch(model, ref.target, shape) if inputs is None else inputs
    return Loaded(ref, model, inputs, parts.get("targets"), parts.get("loss"))


def _kind(built: Any) -> str:
    return f"{len(built)} things" if isinstance(built, (tuple, list)) else type(built).__name__
