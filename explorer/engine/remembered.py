"""Everything a model remembers: a picture of all that can be reached from it, in copies that no later change can reach.

    buffers ─ plain attributes ─┬─ lists, dicts, deques, sets, arrays, objects with or without slots
                                ├─ modules that nobody registered, with their parameters and gradients
                                ├─ closures, partials and bound methods (hooks too, where asked for)
                                └─ attributes of the model's own classes, data of the files they stand in

What torch and the standard library keep for themselves is left out: it says nothing about the model.
"""

from __future__ import annotations

import enum
import functools
import math
import numbers
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from explorer.engine.diffs import same_bits

StateKey = tuple[str, str, Literal["buffer", "attribute"]]
State = dict[StateKey, Any]

_OWN = frozenset(vars(nn.Module())) | {"forward"}
"""What torch keeps in a module's __dict__, and the forward that a policy puts there."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FOREIGN = frozenset({"torch", "numpy"})
_MAX_THINGS = 200_000
_MAX_TEXT = 40
_NOT_WALKED = "not walked"


def read_state(model: nn.Module, *, hooks: bool = False) -> State:
    """Copies of all that `model` remembers, by block and name. `hooks`: what its hooks hold as well."""
    walk = _Walk(model)
    state: State = {}
    for fqn, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                state[fqn, name, "buffer"] = buffer.detach().to("cpu", copy=True)
        for name, value in vars(module).items():
            if name not in _OWN and not isinstance(value, torch.Generator):  # the RNG report has those
                state[fqn, name, "attribute"] = walk.frozen(value)
        walk.meet(type(module))
        if hooks:
            found = [walk.frozen(list(getattr(module, name).values())) for name in _HOOKS]
            state[fqn, "hooks", "attribute"] = [*found, *map(walk.hooks_of, module.parameters(recurse=False))]
    state.update({("", name, "attribute"): value for name, value in walk.of_classes()})
    return state


class _Walk:
    """One look at everything: each thing once, however many ways lead to it."""

    def __init__(self, model: nn.Module) -> None:
        self._images: dict[int, Any] = {}
        self._held: list[Any] = [*model.modules(), *model.parameters(), *model.buffers()]
        self._classes: dict[type, None] = {}
        self._files: dict[int, dict[str, Any]] = {}
        self._images.update((id(thing), f"{type(thing).__qualname__} of the model") for thing in self._held)

    def frozen(self, value: Any) -> Any:
        """`value` as plain data that later changes cannot reach: tensors copied, containers and objects walked.

        A thing that several ways lead to has one image: which of two equal tensors a module holds is no difference.
        """
        if value is None or isinstance(value, (bool, str, bytes, numbers.Number)):
            return _number(value)
        if id(value) in self._images:
            return self._images[id(value)]
        if len(self._held) > _MAX_THINGS:
            return _NOT_WALKED
        self._held.append(value)  # so that no other thing gets its id
        self._images[id(value)] = _NOT_WALKED  # until it is: a thing may hold itself
        self._images[id(value)] = image = self._image(value)
        return image

    def _image(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, Mapping):
            return {_label(key, i): self.frozen(item) for i, (key, item) in enumerate(list(value.items()))}
        if isinstance(value, (set, frozenset)):
            return [len(value), *sorted((self.frozen(item) for item in value), key=repr)]
        if isinstance(value, (list, tuple, deque)):
            return [len(value), *map(self.frozen, value)]
        if (state := _generator_state(value)) is not None:
            return self.frozen(state)
        if callable(value) and (inside := _captured(value)) is not None:
            return [type(value).__qualname__, *map(self.frozen, inside)]
        return self._object(value)

    def hooks_of(self, parameter: nn.Parameter) -> Any:
        """What hooks on the tensor itself hold: clipping, an optimizer in backward."""
        held = (getattr(parameter, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        return [self.frozen(list(hooks.values())) for hooks in held if hooks]

    def meet(self, kind: type) -> None:
        """Remembers the classes of the model's own behind `kind`, and the files that they stand in."""
        for base in kind.__mro__:
            if base in self._classes or not _is_own(base.__module__):
                continue
            self._classes[base] = None
            for function in vars(base).values():
                if isinstance(function, types.FunctionType) and "-packages" not in function.__code__.co_filename:
                    self._files[id(function.__globals__)] = function.__globals__

    def of_classes(self) -> Iterator[tuple[str, Any]]:
        """Data on the classes and in the files that were met, by `Class.name` and by plain name."""
        done: set[type] = set()
        while left := [kind for kind in self._classes if kind not in done]:
            for kind in left:
                done.add(kind)
                for name, value in list(vars(kind).items()):
                    if _is_data(name, value):
                        yield f"{kind.__qualname__}.{name}", self.frozen(value)
        for file in list(self._files.values()):
            for name, value in list(file.items()):
                if _is_data(name, value):
                    yield name, self.frozen(value)

    def _object(self, value: Any) -> Any:
        kind = type(value)
        if kind.__module__ == "numpy":
            return _array(value, self.frozen)
        if kind.__module__ == "itertools" or isinstance(value, (enum.Enum, bytearray, torch.dtype, torch.device)):
            return repr(value)
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
        return [kind.__qualname__, self.frozen(inside)] if inside else kind.__qualname__


def frozen(value: Any) -> Any:
    """One value as plain data that later changes cannot reach."""
    return _Walk(nn.Module()).frozen(value)


def same_state(left: Any, right: Any) -> bool:
    """Whether two frozen values are equal, tensors bit by bit; NaN equals NaN."""
    return _same(left, right, {})


def _same(left: Any, right: Any, known: dict[tuple[int, int], bool]) -> bool:
    """`known`: pairs that were compared before; one image may stand in many places."""
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
    """The plain parts of a frozen value with the way to each."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    else:
        yield path, value


def short(value: Any) -> str:
    """A frozen value in a few words."""
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


def _number(value: Any) -> Any:
    return value.item() if type(value).__module__ == "numpy" else value


def _tensor(value: Tensor) -> Any:
    if value.device.type == "meta":
        return f"meta {tuple(value.shape)}"
    detached = value.detach()
    dense = detached.to_dense() if value.layout is not torch.strided else detached
    copy = dense.to("cpu", copy=True)
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
    except TypeError:  # text, dates: types that torch has not
        return [str(value.dtype), str(value.shape), value.tobytes()]


def _generator_state(value: Any) -> Any:
    """Where a generator stands; None for what is none."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if type(value).__module__.startswith("numpy.random"):
        return value.get_state(legacy=False) if hasattr(value, "get_state") else getattr(value, "bit_generator").state  # noqa: B009
    return None


def _captured(value: Any) -> Iterable[Any] | None:
    """What a function, a method or a partial carries along; None for other callables."""
    if isinstance(value, functools.partial):
        return value.func, list(value.args), value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__.__qualname__, value.__self__
    if not isinstance(value, types.FunctionType):
        return None
    if not _is_own(value.__module__ or ""):
        return (value.__qualname__,)
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # a cell that is still empty
            cells.append(None)
    return value.__qualname__, cells, list(value.__defaults__ or ()), dict(vars(value))


def _is_own(module: str) -> bool:
    top = module.partition(".")[0]
    return top == "__main__" or (top not in _FOREIGN and top not in sys.stdlib_module_names)


def _is_plumbing(kind: type) -> bool:
    """Loggers, locks, threads and the like. Named tuples and namespaces are containers of the user's data."""
    top = kind.__module__.partition(".")[0]
    return top in sys.stdlib_module_names and top not in ("types", "collections", "__main__")


def _is_data(name: str, value: Any) -> bool:
    if name.startswith("__") or name in ("_abc_impl", "_abc_registry"):
        return False
    if isinstance(value, (type, types.ModuleType)) or hasattr(value, "__get__"):
        return False
    return type(value).__module__ in ("builtins", "numpy", "collections", "types", "random", "itertools") or (
        isinstance(value, (Tensor, torch.Generator, nn.Module)) or _is_own(type(value).__module__)
    )


def _label(key: Any, i: int) -> str:
    plain = key is None or isinstance(key, (bool, int, float, str, bytes, tuple)) and "0x" not in repr(key)
    return str(key) if isinstance(key, str) else repr(key) if plain else f"#{i}"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
