"""Puts a loaded model under the conditions of a run: device, type, mode, frozen parameters and adapters.

A step and a description of its model share this file, so that both see the same saved tensors.
"""

from __future__ import annotations

import torch
from torch import nn

from explorer.engine.model.loaded import Loaded, move_to
from explorer.errors import BadInput, nearest
from explorer.record.graph import Conditions

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def under_conditions(loaded: Loaded, conditions: Conditions, device: torch.device | str) -> Loaded:
    """`loaded` on `device`, in the type and mode of `conditions`, with their frozen parameters and adapters.

    Raises BadInput for an unknown frozen name, and for adapters that fit no layer.
    """
    moved = move_to(loaded, device, torch_dtype(conditions))
    set_mode(moved.model, conditions.mode)
    freeze(moved.model, conditions.frozen)
    if conditions.lora is not None:
        from explorer.engine.model.adapters import add_adapters  # a user's own step has its own adapters

        add_adapters(moved.model, conditions.lora)
    if conditions.chunked_layer:
        from explorer.engine.model.loss_chunks import in_chunks

        return in_chunks(moved, conditions.chunked_layer)
    return moved


def autocast_of(conditions: Conditions, device_type: str) -> torch.autocast:
    """The context around forward and loss: casts as `conditions` ask, or not at all."""
    dtype = AUTOCAST.get(conditions.autocast)
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)


def torch_dtype(of: Conditions) -> torch.dtype | None:
    """The type that the run casts the model to; None if the model runs in its own types."""
    dtype: torch.dtype | None = None if of.dtype == "own" else getattr(torch, of.dtype)
    return dtype


def set_mode(model: nn.Module, mode: str) -> None:
    """Sets train or eval mode. A model already in the mode keeps its blocks' modes, such as a frozen BatchNorm."""
    if model.training != (mode == "train"):
        model.train(mode == "train")


def freeze(model: nn.Module, fqns: tuple[str, ...]) -> None:
    """Freezes the parameters at or below `fqns` (blocks or parameters). Raises BadInput with every unknown name."""
    if strangers := unknown_names(model, fqns):
        raise BadInput(
            f"The run freezes {', '.join(strangers)}; the model has no block or parameter of that name.",
            hint=nearest(strangers[0], _names(model)),
        )
    for name, parameter in model.named_parameters():
        if any(fqn in ("", name) or name.startswith(f"{fqn}.") for fqn in fqns):
            parameter.requires_grad_(False)


def unknown_names(model: nn.Module, fqns: tuple[str, ...]) -> list[str]:
    """Those of `fqns` that name neither a block nor a parameter of `model`."""
    names = _names(model)
    return [fqn for fqn in fqns if fqn not in names]


def _names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
