"""What lies in memory before a step begins: the floor of every timeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from explorer.engine.watch.storages import KnownTensor
from explorer.engine.world.bits import storages


def tensors_before_step(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, inputs: Iterable[object]
) -> list[KnownTensor]:
    """Parameters and their gradients, buffers, plain tensor attributes of modules, optimizer state, inputs.

    A tensor that is several of these is the first of them.
    """
    known = []
    for name, parameter in model.named_parameters():
        known.append(KnownTensor(parameter, "parameter", owner(name)))
        if parameter.grad is not None:
            known.append(KnownTensor(parameter.grad, "gradient", owner(name)))
    known += [KnownTensor(buffer, "buffer", owner(name)) for name, buffer in model.named_buffers()]
    for fqn, module in model.named_modules():
        plain = (value for value in vars(module).values() if isinstance(value, torch.Tensor))
        known += [KnownTensor(value, "buffer", fqn) for value in plain]
    known += optimizer_tensors(model, optimizer)
    known += [KnownTensor(leaf, "input", "") for leaf in inputs if isinstance(leaf, torch.Tensor)]
    return known


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
    """Bytes of their storages on `device`, each storage once."""
    return sum({storage._cdata: storage.nbytes() for storage in _storages(things, device)}.values())


def owner(name: str) -> str:
    """fqn of the block that holds the parameter or buffer `name`."""
    return name.rpartition(".")[0]


def _storages(things: Iterable[KnownTensor], device: torch.device) -> Iterator[torch.UntypedStorage]:
    for thing in things:
        if thing.tensor.device.type == device.type:
            yield from storages(thing.tensor)
