"""A second, equal model without shared memory, for runs of a policy.

A deep copy can differ from the model. A copy loses hooks on tensors (clipping, an optimizer in backward), and its
functions (closures, bound methods) still refer to the original. So the factory builds the model again from the same
seed, and the result is compared with the first model. A copy is made only if the two differ, and names its losses.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from explorer.engine.model.load import load
from explorer.engine.model.loaded import Loaded
from explorer.engine.state.bits import same_bits, storages
from explorer.engine.state.state_diff import read_state, same_state


def separate_copy(loaded: Loaded, *, seed: int) -> Loaded:
    """`loaded` in its first state, with a separate model and batch. `loaded` must not have run before."""
    with warnings.catch_warnings(action="ignore"):  # the first build showed the same warnings
        built = load(loaded.ref, seed=seed)
    if is_equal_start(loaded, built):
        return replace(built, inputs=copy_batch(built.inputs), targets=copy_batch(built.targets))
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
    modules = [[(fqn, module.training) for fqn, module in loaded.model.named_modules()] for loaded in (first, second)]
    tensors = [dict((*loaded.model.named_parameters(), *loaded.model.named_buffers())) for loaded in (first, second)]
    if modules[0] != modules[1] or tensors[0].keys() != tensors[1].keys():
        return False
    if not all(_equal_and_apart(tensor, tensors[1][name]) for name, tensor in tensors[0].items()):
        return False
    batches = [tree_leaves((loaded.inputs, loaded.targets)) for loaded in (first, second)]
    if len(batches[0]) != len(batches[1]) or not all(map(_equal, *batches)):
        return False
    # A class or a file is common to both models, and may change between the builds.
    states = [list(read_state(loaded.model, shared=False).values()) for loaded in (first, second)]
    return same_state(*states)


def copy_batch(batch: object) -> Any:
    """Copies of every tensor, with the same `requires_grad`."""

    def copied(leaf: object) -> object:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return tree_map(copied, batch)


def _equal_and_apart(a: Tensor, b: Tensor) -> bool:
    addresses = [{storage.data_ptr() for storage in storages(tensor) if storage.nbytes()} for tensor in (a, b)]
    return a is not b and not addresses[0] & addresses[1] and _equal(a, b)


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.requires_grad == b.requires_grad and same_bits(a, b)
    return type(a) is type(b)
