"""Names of a model's parameters without the wrappers around the model, and whether two models have equal ones.

compiled       _orig_mod.blocks.0.weight                    ┐
DDP            module.blocks.0.weight                       ├─ blocks.0.weight
checkpointed   blocks.0._checkpoint_wrapped_module.weight   ┘
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from explorer.engine.state.bits import same_bits, whole
from explorer.errors import BadInput
from explorer.plan.names import listed

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
    return _tensors(model, "_parameters")


def plain_buffers(model: nn.Module) -> dict[str, Tensor]:
    """All buffers by plain name."""
    return _tensors(model, "_buffers")


def _tensors(model: nn.Module, kind: str) -> dict[str, Any]:
    tensors = ((fqn, *item) for fqn, module in plain_modules(model) for item in getattr(module, kind).items())
    return {f"{fqn}.{name}".lstrip("."): tensor for fqn, name, tensor in tensors if tensor is not None}


def same_parameters(model: nn.Module, other: nn.Module) -> tuple[str, ...]:
    """Names of the parameters to judge. A tied parameter keeps each name that is a separate parameter in either model.

    Raises BadInput with every reason why the two models do not start alike.
    """
    sides = [plain_parameters(model), plain_parameters(other)]
    common = [name for name in sides[0] if name in sides[1]]
    if not common:
        raise BadInput(
            f"Two models are compared that share no name of a parameter: {listed(list(sides[0]))} and "
            f"{listed(list(sides[1]))}.",
            hint="Give both the same names; those of wrappers (compiled, DDP, FSDP, checkpointed) are left out.",
        )
    faults = []
    for side, which in zip(sides, ("reference", "candidate")):
        compared = {id(side[name]) for name in common}
        if alone := [name for name, parameter in side.items() if id(parameter) not in compared]:
            faults.append(f"{listed(alone)} of the {which} alone")
    pairs: list[tuple[str, Tensor, Tensor]] = [(name, sides[0][name], sides[1][name]) for name in common]
    buffers = [plain_buffers(model), plain_buffers(other)]
    pairs += [(name, buffers[0][name], buffers[1][name]) for name in buffers[0] if name in buffers[1]]
    if unequal := [name for name, first, second in pairs if not _starts_alike(first, second)]:
        faults.append(f"other values or shapes in {listed(unequal)}")
    if faults:
        raise BadInput(
            f"Two programs are compared whose parameters differ: {'; '.join(faults)}.",
            hint="Load one state_dict into both before they are judged.",
        )
    firsts = [{id(parameter): name for name, parameter in reversed(side.items()) if name in common} for side in sides]
    return tuple(name for name in common if any(first[id(side[name])] == name for first, side in zip(firsts, sides)))


def _starts_alike(first: Tensor, second: Tensor) -> bool:
    return first is second or same_bits(whole(first).detach().cpu(), whole(second).detach().cpu())
