"""A second, equal model without shared memory, for runs of a policy.

A deep copy can differ from the model. A copy loses hooks on tensors (clipping, an optimizer in backward), and its
functions (closures, bound methods) still refer to the original. So the factory builds the model again from the same
seed, and the result is compared with the first model. A copy is made only if the two differ, and names its losses.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from explorer.engine.model.load import load
from explorer.engine.model.loaded import Loaded
from explorer.engine.state.bits import same_bits, storages
from explorer.engine.state.state_diff import read_state, same_state


def twin(loaded: Loaded, *, seed: int) -> Loaded:
    """`loaded` in its first state, with a separate model and batch. `loaded` must not have run before."""
    with warnings.catch_warnings(action="ignore"):  # the first build showed the same warnings
        built = load(loaded.ref, seed=seed)
    if is_same_start(loaded, built):
        return replace(built, inputs=own_batch(built.inputs), targets=own_batch(built.targets))
    parts = (loaded.model, loaded.inputs, loaded.targets, loaded.loss_function)
    model, inputs, targets, loss_function = copy.deepcopy(parts)
    lost = left_behind(loaded.model, model)
    return replace(loaded, model=model, inputs=inputs, targets=targets, loss_function=loss_function, left_behind=lost)


def left_behind(model: nn.Module, copied: nn.Module) -> str:
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


def is_same_start(one: Loaded, other: Loaded) -> bool:
    """Whether both start from the same bits, in separate memory."""
    modules = [[(fqn, module.training) for fqn, module in loaded.model.named_modules()] for loaded in (one, other)]
    tensors = [dict(_named(loaded.model)) for loaded in (one, other)]
    if modules[0] != modules[1] or tensors[0].keys() != tensors[1].keys():
        return False
    if not all(_equal_and_apart(tensor, tensors[1][name]) for name, tensor in tensors[0].items()):
        return False
    batches = [tree_leaves((loaded.inputs, loaded.targets)) for loaded in (one, other)]
    if len(batches[0]) != len(batches[1]) or not all(map(_equal, *batches)):
        return False
    return same_state(_remembered(one.model), _remembered(other.model))


def own_batch(batch: Any) -> Any:
    """Copies of every tensor, with the same `requires_grad`."""
    return tree_map(lambda leaf: _own(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _remembered(model: nn.Module) -> Any:
    """State that each model holds alone. A class or a file is common to both, and may change between the builds."""
    return [value for key, value in read_state(model).items() if key[0] or key[1] in vars(model)]


def _equal_and_apart(one: Tensor, other: Tensor) -> bool:
    addresses = [{storage.data_ptr() for storage in storages(tensor) if storage.nbytes()} for tensor in (one, other)]
    return one is not other and not addresses[0] & addresses[1] and _equal(one, other)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.requires_grad == other.requires_grad and same_bits(one, other)
    return type(one) is type(other)
