"""Whether two models are equal, names of their tensors without wrappers, and a second model without shared memory.

compiled       _orig_mod.blocks.0.weight                    ┐
DDP            module.blocks.0.weight                       ├─ blocks.0.weight
checkpointed   blocks.0._checkpoint_wrapped_module.weight   ┘

A policy runs on a second model. A deep copy can differ from the model: a copy loses hooks on tensors (clipping, an
optimizer in backward), and its functions (closures, bound methods) still refer to the original. So the factory builds
the model again from the same seed, and the result is compared with the first model. A copy is made only if the two
differ, and names its losses.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from explorer.engine.model.loaded import Loaded
from explorer.engine.state.bits import same_bits, storages, whole
from explorer.engine.state.state_diff import read_state, same_state
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
    tensors = {}
    for fqn, module in plain_modules(model):
        for name, tensor in getattr(module, kind).items():
            if tensor is not None:
                tensors[f"{fqn}.{name}".lstrip(".")] = tensor
    return tensors


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
    return first is second or same_bits(whole(first).detach(), whole(second).detach())


def separate_copy(loaded: Loaded, *, seed: int) -> Loaded:
    """`loaded` in its first state, with a separate model and batch. `loaded` must not have run before."""
    from explorer.engine.model.load import load  # a step of the user's own script loads nothing

    with warnings.catch_warnings(action="ignore"):  # the first build showed the same warnings
        built = load(loaded.ref, seed=seed)
    if is_equal_start(loaded, built):
        inputs, targets = copy_batch((built.inputs, built.targets))
        return replace(built, inputs=inputs, targets=targets)
    return deep_copy(loaded)


def deep_copy(loaded: Loaded) -> Loaded:
    """A copy of `loaded`, whose `left_behind` names lost state. Raises what copying the model raises."""
    parts = (loaded.model, loaded.inputs, loaded.targets, loaded.loss_function)
    model, inputs, targets, loss_function = copy.deepcopy(parts)
    lost = lost_state(loaded.model, model)
    return replace(loaded, model=model, inputs=inputs, targets=targets, loss_function=loss_function, left_behind=lost)


def lost_state(model: nn.Module, copied: nn.Module) -> str:
    """A sentence about state that the copy has lost; empty if the copy is the same model."""
    there, here = (read_state(each, whole=True) for each in (model, copied))
    lost = [f"{key[0]}.{key[1]}".lstrip(".") for key, value in there.items() if not same_state(value, here.get(key))]
    if not lost:
        return ""
    return (
        "The factory builds another model each time, and a copy of one is not the same model: it lacks hooks on "
        f"tensors, or functions of it hold the original ({', '.join(lost[:3])}{', …' if len(lost) > 3 else ''}). "
        "Let the factory draw its weights from torch's generators, which are seeded before it is called."
    )


def is_equal_start(first: Loaded, second: Loaded) -> bool:
    """Whether both start from the same bits, in separate memory."""
    if _modes(first.model) != _modes(second.model):
        return False
    tensors, others = _all_tensors(first.model), _all_tensors(second.model)
    if tensors.keys() != others.keys():
        return False
    if not all(_equal_and_apart(tensor, others[name]) for name, tensor in tensors.items()):
        return False
    batches = [tree_leaves((loaded.inputs, loaded.targets)) for loaded in (first, second)]
    if len(batches[0]) != len(batches[1]) or not all(map(_equal, *batches)):
        return False
    # A class or a file is common to both models, and may change between the builds.
    states = [list(read_state(loaded.model, shared=False).values()) for loaded in (first, second)]
    return same_state(*states)


def _modes(model: nn.Module) -> list[tuple[str, bool]]:
    return [(fqn, module.training) for fqn, module in model.named_modules()]


def _all_tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


def copy_batch(batch: object) -> Any:
    """Copies of every tensor, with the same `requires_grad`. A tensor that occurs twice has one copy."""
    copies: dict[int, Tensor] = {}

    def copied(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return tree_map(copied, batch)


def _equal_and_apart(a: Tensor, b: Tensor) -> bool:
    return a is not b and _addresses(a).isdisjoint(_addresses(b)) and _equal(a, b)


def _addresses(tensor: Tensor) -> set[int]:
    return {storage.data_ptr() for storage in storages(tensor) if storage.nbytes()}


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.requires_grad == b.requires_grad and same_bits(a, b)
    return type(a) is type(b)
