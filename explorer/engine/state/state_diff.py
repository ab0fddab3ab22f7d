"""The state of a model: everything reachable from the model, in copies that later changes cannot reach.

    buffers ─ plain attributes ─┬─ lists, dicts, deques, sets, arrays, objects with or without slots
                                ├─ unregistered modules, with their parameters and gradients
                                ├─ closures, partials and bound methods (hooks too, where asked for)
                                └─ attributes of the model's own classes, data of their files,
                                   and names that their code uses in other files of their author

State of torch and the standard library is left out: it does not belong to the model.
"""

from __future__ import annotations

import enum
import math
import numbers
import operator
import sys
import types
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from explorer.engine.state.bits import dense, same_bits
from explorer.engine.state.closures import captured, function_of, is_own_function, is_own_module, state_of_itself
from explorer.engine.state.referenced_names import File, is_of_author, referenced_names

StateKey = tuple[str, str, Literal["buffer", "attribute"]]
State = dict[StateKey, Any]

_OWN = frozenset(vars(nn.Module())) | {"forward", "_call_impl"}
"""Names in a module's __dict__ that torch or a policy sets."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_DATA = frozenset({"builtins", "types", "collections", "weakref", "queue", "_queue", "_thread", "array", "random",
                      "itertools", "__main__"})  # fmt: skip
"""Modules of the standard library whose objects hold a user's data."""
_MAX_TEXT = 40
_MAX_THINGS = 200_000
_MAX_ITEMS = 100_000
"""Longer containers are read for plain values alone, so that the walk still reaches the objects beside them."""
_NOT_WALKED = "not walked"
BEYOND = "beyond the walk"
"""Image of objects beyond a limit: two such images are equal but do not show that the objects are."""


def read_state(model: nn.Module, *, whole: bool = False) -> State:
    """Copies of the state of `model`, by block and name.

    `whole` adds hooks, modes and attributes of parameters, which an observer may also set on the model.
    """
    walk = Walk(model)
    state: State = {}
    for fqn, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                state[fqn, name, "buffer"] = _tensor(buffer)
        for name, value in vars(module).items():
            if not _is_torchs(name) and not isinstance(value, torch.Generator):  # the RNG report has those
                state[fqn, name, "attribute"] = walk.image(value)
        walk.meet(type(module))
        if whole:
            state[fqn, "mode", "attribute"] = [type(module).__qualname__, module.training]
            state[fqn, "hooks", "attribute"] = [walk.image(list(getattr(module, name).values())) for name in _HOOKS]
            for name, parameter in module.named_parameters(recurse=False):
                state[fqn, f"{name} itself", "attribute"] = walk.of_parameter(parameter)
    state.update({("", place.said, "attribute"): walk.image(place.value) for place in walk.common()})
    return state


class CommonPlace(NamedTuple):
    """A name in a file or on a class."""

    owner: File | type
    name: str
    said: str

    @property
    def value(self) -> Any:
        return self.owner[self.name] if isinstance(self.owner, dict) else vars(self.owner)[self.name]

    def put(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


class Walk:
    """One walk over the state of a model, which visits each object once."""

    def __init__(self, model: nn.Module) -> None:
        self._images: dict[int, Any] = {}
        self._held: list[Any] = [*model.modules(), *model.parameters(), *model.buffers()]
        self._classes: dict[type, None] = {}
        self._files: dict[int, File] = {}
        self._elsewhere: dict[tuple[int, str], File] = {}
        self._followed: set[types.FunctionType] = set()
        self._images.update((id(thing), f"{type(thing).__qualname__} of the model") for thing in self._held)

    def image(self, value: Any) -> Any:
        """`value` as plain data that later changes cannot reach: tensors are copied, containers and objects walked.

        An object reached on several paths has one image. Two equal tensors have equal images.
        """
        if value is None or isinstance(value, (bool, str, bytes, numbers.Number)):
            return _number(value)
        if id(value) in self._images:
            return self._images[id(value)]
        if len(self._held) > _MAX_THINGS:
            return BEYOND
        self._held.append(value)  # so that no other object gets its id
        self._images[id(value)] = _NOT_WALKED  # an object may hold itself
        self._images[id(value)] = image = self._image(value)
        return image

    def _image(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _tensor(value)
        if (held := self._contents(value)) is not None:
            beside = getattr(value, "__dict__", None)
            return {"contents": held, "attributes": self.image(dict(beside))} if beside else held
        if (state := state_of_itself(value)) is not None:
            return self.image(state)
        if (inside := captured(value)) is not None:
            return [type(value).__qualname__, *map(self.image, inside)]
        return self._object(value)

    def _contents(self, value: Any) -> Any:
        """Image of a container's items; None if `value` is no container."""
        if not isinstance(value, (Mapping, set, frozenset, list, tuple, deque, array)):
            return None
        frozen = self.image if len(value) <= _MAX_ITEMS else _beyond
        if isinstance(value, Mapping):
            return {_label(key, i): plain_copy(item) for i, (key, item) in enumerate(list(value.items()))}
        if isinstance(value, (set, frozenset)):
            return [len(value), *sorted((plain_copy(item) for item in value), key=repr)]
        return [len(value), *map(frozen, value)]

    def of_parameter(self, parameter: nn.Parameter) -> Any:
        """Whether the parameter is trained, its extra attributes, and state of its hooks: clipping, an optimizer."""
        held = (getattr(parameter, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        hooks = [self.image(list(hooks.values())) for hooks in held if hooks]
        beside = {name: value for name, value in vars(parameter).items() if not _is_torchs(name)}
        return [parameter.requires_grad, self.image(beside), hooks]

    def meet(self, kind: type) -> None:
        """Collects the user's classes among the bases of `kind`, and their files."""
        for base in kind.__mro__:
            if base in self._classes or not is_own_module(base.__module__):
                continue
            self._classes[base] = None
            for value in list(vars(base).values()):
                function = function_of(value)
                if is_own_function(function):
                    self._files[id(function.__globals__)] = function.__globals__
                    self._follow(function)

    def _follow(self, function: types.FunctionType) -> None:
        """Collects names that the code of `function` uses in files that are not walked as a whole."""
        if function in self._followed:
            return
        self._followed.add(function)
        for file, name in referenced_names(function):
            value = file[name]
            if isinstance(value, type) and is_of_author(value):
                self.meet(value)
            elif isinstance(value, types.FunctionType) and is_of_author(value):
                self._follow(value)
            elif _is_data(name, value):
                self._elsewhere[id(file), name] = file

    def common(self) -> Iterator[CommonPlace]:
        """Data on the collected classes and in their files, which all models of these classes share.

        State of functions counts too: defaults that are changed in place, attributes, closures of decorators.
        """
        for file in list(self._files.values()):
            yield from (CommonPlace(file, name, name) for name, value in list(file.items()) if _is_data(name, value))
        for (_, name), file in list(self._elsewhere.items()):
            if id(file) not in self._files:
                yield CommonPlace(file, name, f"{file['__name__']}.{name}")
        done: set[type] = set()
        while left := [kind for kind in self._classes if kind not in done]:
            for kind in left:
                done.add(kind)
                for name, value in list(vars(kind).items()):
                    if _is_data(name, value):
                        yield CommonPlace(kind, name, f"{kind.__qualname__}.{name}")

    def _object(self, value: Any) -> Any:
        kind = type(value)
        if kind.__module__ == "numpy":
            return _array(value, self.image)
        if kind.__module__ == "itertools" or isinstance(value, (enum.Enum, bytearray, torch.dtype, torch.device)):
            return repr(value)
        if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
            return [kind.__qualname__, operator.length_hint(value, -1)]
        if isinstance(value, (type, types.ModuleType, RemovableHandle)) or _is_plumbing(kind):
            return kind.__qualname__
        self.meet(kind)
        own = _OWN - {"_parameters", "_buffers", "_modules"} if isinstance(value, nn.Module) else ()
        inside = {name: held for name, held in getattr(value, "__dict__", {}).items() if name not in own}
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    inside[name] = getattr(value, name)
        return [kind.__qualname__, self.image(inside)] if inside else kind.__qualname__


def plain_copy(value: Any) -> Any:
    """A value as plain data that later changes cannot reach."""
    return Walk(nn.Module()).image(value)


def _beyond(value: Any) -> Any:
    return _number(value) if value is None or isinstance(value, (bool, str, bytes, numbers.Number)) else BEYOND


def _number(value: Any) -> Any:
    return value.item() if type(value).__module__ == "numpy" else value


def _tensor(value: Tensor) -> Any:
    held = dense(value)
    if not held.numel() and (held.shape != value.shape or value.is_meta):  # reading a freed sharded tensor crashes
        return f"{'meta' if value.is_meta else 'freed'} {tuple(value.shape)}"
    copy = held.clone() if value.device.type == "cpu" else held
    if value.is_leaf and value.grad is not None:
        return {"value": copy, "grad": _tensor(value.grad)}
    return copy


def _array(value: Any, walk: Any) -> Any:
    if not hasattr(value, "tobytes"):
        return type(value).__qualname__
    if value.dtype.hasobject:
        return walk(value.tolist())
    try:
        return torch.from_numpy(value.copy())
    except TypeError:  # text, dates: types that torch lacks
        return [str(value.dtype), str(value.shape), value.tobytes()]


def _is_torchs(name: str) -> bool:
    """Whether torch sets the attribute on a module or parameter, also when compiling: addresses, marks, the model."""
    return name in _OWN or name.startswith(("_torchdynamo_", "_dynamo_")) or name == "dynamo_ctx"


def _is_plumbing(kind: type) -> bool:
    """Whether `kind` is a class such as a logger, lock or file, from which a walk would reach the whole process."""
    top = kind.__module__.partition(".")[0]
    return top in sys.stdlib_module_names and top not in _OF_DATA


def _is_data(name: str, value: Any) -> bool:
    if is_own_function(value):
        return True
    if name.startswith("__") or name == "_abc_impl" or hasattr(type(value), "__get__"):
        return False
    return not isinstance(value, (type, types.ModuleType)) and not _is_plumbing(type(value))


def _label(key: Any, i: int) -> str:
    plain = key is None or isinstance(key, (bool, int, float, str, bytes, tuple)) and "0x" not in repr(key)
    return str(key) if isinstance(key, str) else repr(key) if plain else f"#{i}"


def same_state(left: Any, right: Any) -> bool:
    """Whether two frozen values are equal, tensors bit by bit; NaN equals NaN."""
    return _same(left, right, {})


def _same(left: Any, right: Any, known: dict[tuple[int, int], bool]) -> bool:
    """As `same_state`. `known` has the results of earlier pairs, because one image may occur in many places."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (Tensor, dict, list)):
        pair = id(left), id(right)
        if pair not in known:
            known[pair] = same_bits(left, right) if isinstance(left, Tensor) else _same_parts(left, right, known)
        return known[pair]
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return bool(left == right)


def _same_parts(left: Any, right: Any, known: dict[tuple[int, int], bool]) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key], known) for key in left)
    return len(left) == len(right) and all(_same(one, other, known) for one, other in zip(left, right))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The plain parts of a frozen value, each with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    else:
        yield path, value


def short_text(value: Any) -> str:
    """A frozen value as short text."""
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
