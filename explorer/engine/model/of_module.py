"""What the module behind a block says of it before anything runs: its kind, its bytes, the parameters of its own."""

from __future__ import annotations

from typing import TypedDict

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from explorer.engine.world.bits import n_bytes


class OfModule(TypedDict):
    """Fields of a Block."""

    fqn: str
    kind: str
    parameter_bytes: int
    buffer_bytes: int
    own_parameters: tuple[str, ...]


def of_module(fqn: str, module: nn.Module) -> OfModule:
    """The same for a block that is described from a forward and for one of a recorded step."""
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
    """Whether it is one of torch's norms whose forward moves a mean and a variance."""
    return isinstance(module, _NormBase) and module.track_running_stats and module.running_mean is not None
