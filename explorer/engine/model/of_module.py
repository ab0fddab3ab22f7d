"""Facts of a block from its module alone, before anything runs: kind, bytes, and the module's direct parameters."""

from __future__ import annotations

from typing import TypedDict

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from explorer.engine.state.bits import n_bytes


class OfModule(TypedDict):
    """Fields of a Block."""

    fqn: str
    kind: str
    parameter_bytes: int
    buffer_bytes: int
    own_parameters: tuple[str, ...]


def of_module(fqn: str, module: nn.Module) -> OfModule:
    """Fields of a Block from its module, for described models and for recorded steps alike."""
    return OfModule(
        fqn=fqn,
        kind=type(module).__name__,
        parameter_bytes=sum(map(n_bytes, module.parameters())),
        buffer_bytes=sum(map(n_bytes, module.buffers())),
        own_parameters=tuple(
            f"{fqn}.{name}".lstrip(".") for name, own in module._parameters.items() if own is not None
        ),
    )


def has_running_statistics(module: nn.Module) -> bool:
    """Whether `module` is a norm of torch whose forward updates a mean and a variance."""
    return isinstance(module, _NormBase) and module.track_running_stats and module.running_mean is not None
