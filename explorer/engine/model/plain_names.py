"""Names of a model's parameters without the wrappers around the model.

compiled       _orig_mod.blocks.0.weight                    ┐
DDP            module.blocks.0.weight                       ├─ blocks.0.weight
checkpointed   blocks.0._checkpoint_wrapped_module.weight   ┘
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

WRAPPED = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attribute names under which wrappers hold their module."""


def inside(module: nn.Module) -> str:
    """The name under which a wrapper holds its module; empty if `module` is not a wrapper.

    A wrapper has one child and no direct tensor. The name alone is ambiguous: a part of a model may be called `module`.
    """
    children = [name for name, child in module._modules.items() if child is not None]
    has_tensor = any(value is not None for value in (*module._parameters.values(), *module._buffers.values()))
    return children[0] if len(children) == 1 and children[0] in WRAPPED and not has_tensor else ""


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module except wrappers, by its name without wrappers. A shared module appears under each of its names."""
    yield from _walk("", model, ())


def _walk(fqn: str, module: nn.Module, above: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in above:  # a module that holds itself
        return
    above = (*above, id(module))
    if name := inside(module):
        yield from _walk(fqn, getattr(module, name), above)
        return
    yield fqn, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(f"{fqn}.{name}".lstrip("."), child, above)


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by plain name. A shared parameter appears under each of its names."""
    return {
        f"{fqn}.{name}".lstrip("."): parameter
        for fqn, module in plain_modules(model)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }


def plain_buffers(model: nn.Module) -> dict[str, Tensor]:
    """All buffers by plain name."""
    return {
        f"{fqn}.{name}".lstrip("."): buffer
        for fqn, module in plain_modules(model)
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
