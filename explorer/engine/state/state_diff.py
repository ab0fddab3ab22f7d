"""Copies of a model's state as plain data, which later changes cannot reach, and the difference of two such copies.

The walk sees state that moves, however late it acts: a counter that matters in step 1,000. The probe for hidden state
sees state that acts within its ten calls, wherever it is. Neither replaces a part of the other.

buffers ─ attributes ─┬─ whatever they reach, see reachable.py; unregistered modules with parameters and gradients
                      ├─ hooks, modes and attributes of parameters, where asked for
                      └─ SharedNames: classes of the model, their files, names that their code uses elsewhere
"""

from __future__ import annotations

import copy
import enum
import math
import operator
import random
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from explorer.engine.state.bits import dense, same_bits
from explorer.engine.state.reachable import (
    MAX_ITEMS,
    MAX_OBJECTS,
    OF_TORCH_OR_POLICY,
    PLAIN,
    SharedNames,
    attributes,
    closure,
    is_opaque,
    items,
)
from explorer.engine.state.rng import get_state

StateKey = tuple[str, str, Literal["buffer", "attribute"]]
State = dict[StateKey, object]
Path = tuple[str | int, ...]
"""Names of attributes, keys and indices that lead to a value."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MAX_TEXT = 40
_NOT_WALKED = "not walked"
BEYOND = "beyond the walk"
"""Image of objects beyond a limit: two such images are equal but do not show that the objects are."""


def read_state(model: nn.Module, *, whole: bool = False, shared: bool = True) -> State:
    """Copies of the state of `model`, by block and name.

    `whole` adds hooks, modes and attributes of parameters, which an observer may also set on the model. Without
    `shared` the data that all models of the process share is left out.
    """
    images = Images(model)
    state: State = {}
    for fqn, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                state[fqn, name, "buffer"] = _tensor(buffer)
        for name, value in vars(module).items():
            if not _is_of_torch(name) and not isinstance(value, torch.Generator):  # the RNG report has those
                state[fqn, name, "attribute"] = images.image(value)
        if whole:
            state[fqn, "mode", "attribute"] = [type(module).__qualname__, module.training]
            state[fqn, "hooks", "attribute"] = [images.image(list(getattr(module, name).values())) for name in _HOOKS]
            for name, parameter in module.named_parameters(recurse=False):
                state[fqn, f"{name} itself", "attribute"] = images.of_parameter(parameter)
    if shared:
        state.update({("", name.path, "attribute"): images.image(name.value) for name in images.shared})
    return state


def plain_copy(value: object) -> object:
    """A value as plain data that later changes cannot reach."""
    return Images(nn.Module()).image(value)


TensorImages = dict[int, tuple[Tensor, int, object]]
"""Images of tensors by identity, each with the tensor and its version."""


class Images:
    """Images of objects as plain data, one for each object. Two equal tensors have equal images.

    Several walks may share `tensors`: a tensor that was not written in between is copied once.
    """

    def __init__(
        self, model: nn.Module, *, most_objects: int = MAX_OBJECTS, tensors: TensorImages | None = None
    ) -> None:
        self.shared = SharedNames(model)
        self._most_objects, self._tensors = most_objects, tensors
        self._objects: list[object] = [*model.modules(), *model.parameters(), *model.buffers()]
        """Every object with an image, so that no other object gets its id."""
        self._images: dict[int, object] = {
            id(part): f"{type(part).__qualname__} of the model" for part in self._objects
        }
        self._of_model = dict(self._images)

    def later(self) -> Images:
        """A new walk of the same model at a later time."""
        walk = copy.copy(self)
        walk._objects, walk._images = self._objects[: len(self._of_model)], dict(self._of_model)
        return walk

    def image(self, value: object) -> object:
        """`value` as plain data: tensors are copied, containers and objects walked."""
        if isinstance(value, PLAIN):
            return _number(value)
        if id(value) in self._images:
            return self._images[id(value)]
        if len(self._objects) > self._most_objects:
            return BEYOND
        self._objects.append(value)
        self._images[id(value)] = _NOT_WALKED  # an object may hold itself
        self._images[id(value)] = image = self._image(value)
        return image

    def _image(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return self.of_tensor(value)
        inside = list(value) if isinstance(value, array) else items(value)
        if inside is not None:
            image, beside = self._of_items(value, inside), getattr(value, "__dict__", None)
            return {"contents": image, "attributes": self.image(dict(beside))} if beside else image
        if _has_random_state(value):
            return self.image(get_state(value))
        if (captured := closure(value)) is not None:
            return [type(value).__qualname__, *map(self.image, captured)]
        return self._of_object(value)

    def of_tensor(self, value: Tensor) -> object:
        """A copy of a tensor, also of one of the model."""
        if self._tensors is None or value.is_inference():
            return _tensor(value)
        last = self._tensors.get(id(value))
        if last is None or last[1] != value._version:
            last = self._tensors[id(value)] = value, value._version, _tensor(value)
        return last[2]

    def _of_items(self, value: object, inside: list[object]) -> object:
        """A longer container is read for plain values alone, so that the walk still reaches the objects beside it."""
        if len(inside) > MAX_ITEMS:
            inside = [item if isinstance(item, PLAIN) else BEYOND for item in inside]
        images = [self.image(item) for item in inside]
        if isinstance(value, Mapping):
            return {_label(key, i): image for i, (key, image) in enumerate(zip(list(value), images))}
        return [len(inside), *(sorted(images, key=repr) if isinstance(value, (set, frozenset)) else images)]

    def _of_object(self, value: object) -> object:
        kind = type(value)
        if kind.__module__ == "numpy":
            return _array(value, self)
        if kind.__module__ == "itertools" or isinstance(value, (enum.Enum, bytearray, torch.dtype, torch.device)):
            text = repr(value)  # of a count its number, of a cycle its address
            return kind.__qualname__ if " object at 0x" in text else text
        if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
            return [kind.__qualname__, operator.length_hint(value, -1)]
        if is_opaque(value):
            return kind.__qualname__
        self.shared.add(kind)
        left_out = OF_TORCH_OR_POLICY - {"_parameters", "_buffers", "_modules"} if isinstance(value, nn.Module) else ()
        inside = {name: part for name, part in attributes(value).items() if name not in left_out}
        return [kind.__qualname__, self.image(inside)] if inside else kind.__qualname__

    def of_parameter(self, parameter: nn.Parameter) -> object:
        """Whether the parameter is trained, its extra attributes, and state of its hooks: clipping, an optimizer."""
        registered = (getattr(parameter, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        hooks = [self.image(list(hooks.values())) for hooks in registered if hooks]
        beside = {name: value for name, value in vars(parameter).items() if not _is_of_torch(name)}
        return [parameter.requires_grad, self.image(beside), hooks]


def _has_random_state(value: object) -> bool:
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)
    return type(value).__module__.startswith("numpy.random")


def _number(value: Any) -> object:
    return value.item() if type(value).__module__ == "numpy" else value


def _tensor(value: Tensor) -> object:
    content = dense(value)
    if not content.numel() and (content.shape != value.shape or value.is_meta):  # a read of a freed shard crashes
        return f"{'meta' if value.is_meta else 'freed'} {tuple(value.shape)}"
    image = content.clone() if value.device.type == "cpu" else content
    if value.is_leaf and value.grad is not None:
        return {"value": image, "grad": _tensor(value.grad)}
    return image


def _array(value: Any, images: Images) -> object:
    if not hasattr(value, "tobytes"):
        return type(value).__qualname__
    if value.dtype.hasobject:
        return images.image(value.tolist())
    try:
        return torch.from_numpy(value.copy())
    except TypeError:  # text, dates: types that torch lacks
        return [str(value.dtype), str(value.shape), value.tobytes()]


def _is_of_torch(name: str) -> bool:
    """Whether torch sets the attribute on a module or parameter, also when compiling: addresses, marks, the model."""
    return (
        name in OF_TORCH_OR_POLICY
        or name.startswith(("_torchdynamo_", "_dynamo_", "__composable_api_state_"))
        or name == "dynamo_ctx"
    )


def _label(key: object, i: int) -> str:
    if isinstance(key, str):
        return key
    plain = key is None or isinstance(key, (bool, int, float, bytes, tuple)) and "0x" not in repr(key)
    return repr(key) if plain else f"#{i}"


def same_state(left: object, right: object) -> bool:
    """Whether two plain copies are equal, tensors bit by bit; NaN equals NaN."""
    return _same(left, right, {})


def _same(left: Any, right: Any, results: dict[tuple[int, int], bool]) -> bool:
    """As `same_state`. `results` has results of earlier pairs, because one image may occur in many places."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, (Tensor, dict, list)):
        pair = id(left), id(right)
        if pair not in results:
            results[pair] = same_bits(left, right) if isinstance(left, Tensor) else _same_parts(left, right, results)
        return results[pair]
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def _same_parts(left: Any, right: Any, results: dict[tuple[int, int], bool]) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key], results) for key in left)
    return len(left) == len(right) and all(_same(a, b, results) for a, b in zip(left, right))


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The parts of a plain copy, each with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    else:
        yield path, value


def differences_in(left: object, right: object, path: Path = ()) -> Iterator[tuple[Path, object, object]]:
    """The smallest parts in which two plain copies differ, with the names and indices that lead to them."""
    if same_state(left, right):
        return
    parts, others = (_named_parts(value) for value in (left, right))
    common = parts.keys() & others.keys()
    if len(parts) != len(others) or len(common) < len(parts) or not parts:
        yield path, left, right
        return
    for name, part in parts.items():
        yield from differences_in(part, others[name], (*path, *name))


def _named_parts(value: object) -> dict[Path, object]:
    """Parts of an object or container; an object's image is its kind and its attributes."""
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], dict):
        value = value[1]
    if isinstance(value, dict):
        return {(name,): part for name, part in value.items()}
    return {(i,): part for i, part in enumerate(value[1:])} if isinstance(value, list) else {}


def short_text(value: object) -> str:
    """A plain copy as short text."""
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return _cut(f"{value.item():.6g}" if value.is_floating_point() else str(value.item()))
        first = ", ".join(f"{number:.5g}" for number in value.flatten()[:3].tolist())
        return f"{first}, … ({' x '.join(map(str, value.shape))})"
    if isinstance(value, list) and value and isinstance(value[0], int):
        return f"{value[0]} items"
    if isinstance(value, list):
        return str(value[0]) if value else "empty"
    if isinstance(value, dict):
        return f"{len(value)} items"
    return "absent" if value is None else _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
