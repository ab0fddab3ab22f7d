"""Tensors in memory before a step begins: the floor of every timeline."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from explorer.engine.state.bits import storages
from explorer.engine.watch.storages import KnownTensor


def tensors_before_step(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, inputs: Iterable[object]
) -> list[KnownTensor]:
    """Parameters and their gradients, buffers, plain tensor attributes of modules, optimizer state, inputs.

    A tensor of several roles has the first of its roles in this order.
    """
    known = []
    for name, parameter in model.named_parameters():
        known.append(KnownTensor(parameter, "parameter", owner(name)))
    known += gradients(model)
    known += [KnownTensor(buffer, "buffer", owner(name)) for name, buffer in model.named_buffers()]
    for fqn, module in model.named_modules():
        plain = (value for value in vars(module).values() if isinstance(value, torch.Tensor))
        known += [KnownTensor(value, "buffer", fqn) for value in plain]
    known += optimizer_tensors(model, optimizer)
    known += [KnownTensor(leaf, "input", "") for leaf in inputs if isinstance(leaf, torch.Tensor)]
    return known


def gradients(model: nn.Module) -> list[KnownTensor]:
    """Gradients that parameters hold now."""
    named = model.named_parameters()
    return [KnownTensor(one.grad, "gradient", owner(name)) for name, one in named if one.grad is not None]


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[KnownTensor]:
    """The optimizer's state, each tensor with the block of its parameter."""
    if optimizer is None:
        return []
    owners: dict[torch.Tensor, str] = {p: owner(name) for name, p in model.named_parameters()}
    return [
        KnownTensor(value, "optimizer state", owners.get(parameter, ""))
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def storage_bytes(things: Iterable[KnownTensor], device: torch.device) -> int:
    """Bytes of the tensors' storages on `device`, each storage once."""
    held = (storage for thing in things for storage in storages(thing.tensor))
    return sum({one._cdata: one.nbytes() for one in held if one.device.type == device.type}.values())


def owner(name: str) -> str:
    """fqn of the block that holds the parameter or buffer `name`."""
    return name.rpartition(".")[0]
