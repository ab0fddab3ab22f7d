"""What an object holds, and one walk over all that can be reached. Nothing of the user is imported, called or changed.

    model, step ─┬─ lists, dicts, deques, sets           items
                 ├─ functions, partials, bound methods   closures: cells, defaults, attributes, the bound object
                 ├─ objects with or without slots        attributes
                 └─ classes and files                    SharedNames: data that all models of the process share

The state of torch, numpy and the standard library is left out: it does not belong to a model. The same holds for names
that no code of the model uses: a data set in an imported file is no state of the model.
"""

from __future__ import annotations

import functools
import gc
import numbers
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from explorer.engine.state.rng import is_generator

File = dict[str, object]
"""The namespace of a file: its globals."""
PLAIN = (type(None), bool, int, float, str, bytes, numbers.Number)
MAX_OBJECTS = 200_000
"""Objects that one walk visits at most."""
MAX_ITEMS = 100_000
"""Longest container whose items are walked."""
_DEEPEST = 6
OF_TORCH = frozenset(vars(nn.Module()))
"""Names in a module's __dict__ that torch sets."""
OF_TORCH_OR_POLICY = OF_TORCH | {"forward", "_call_impl", "_compiled_call_impl"}
_OF_DATA = frozenset(
    str.split("""
builtins types collections weakref queue _queue _thread array random itertools __main__
""")
)
"""Modules of the standard library whose objects hold a user's data."""
_WITHOUT_STATE = sys.stdlib_module_names | {__name__.partition(".")[0]}
"""Packages that hold no state of a model. This package is named because a checkout is not installed."""


def instances_in_memory(*bases: type) -> list[Any]:
    """Every object of these classes and of their subclasses.

    Every object refers to its class, so Python's own search for referrers finds the instances. A list of all 300,000
    objects of a process takes three times as long.
    """
    classes: list[type] = list(bases)
    for base in classes:
        below: list[type] = type.__subclasses__(base)
        classes += [kind for kind in below if kind not in classes]
    return [thing for thing in gc.get_referrers(*classes) if issubclass(type(thing), bases)]


def items(value: object) -> list[object] | None:
    """Items of a container, values of a mapping; None if `value` is neither."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple, deque, set, frozenset)) else None


def attributes(value: object) -> dict[str, object]:
    """Attributes of an object, those in slots included. No property and no `__getattr__` is called."""
    inside = dict(getattr(value, "__dict__", None) or {})
    for base in type(value).__mro__:
        if "__slots__" in vars(base):
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType):
                    with suppress(AttributeError):  # not set
                        inside[name] = member.__get__(value)
    return inside


def closure(value: object) -> tuple[object, ...] | None:
    """Values that a function, a method or a partial holds; None for any other value.

    A function of an installed package counts by name alone: the state of a library is no state of the model.
    """
    if isinstance(value, functools.partial):
        return value.func, list(value.args), value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if not isinstance(value, types.FunctionType):
        return None
    if not is_own_function(value):
        return (value.__qualname__,)
    defaults = [list(value.__defaults__ or ()), dict(value.__kwdefaults__ or {})]
    return value.__qualname__, cell_contents(value), defaults, dict(vars(value))


def cell_contents(value: object) -> list[object]:
    """Variables that a function or method of the model's author holds from the function around it."""
    return [content for _, content in cells(_function_of(value))] if is_own_function(value) else []


def cells(function: types.FunctionType) -> Iterator[tuple[types.CellType, object]]:
    """The cells of a function with their contents, without those that are still empty."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            yield cell, cell.cell_contents


def reachable(
    roots: Iterable[object], parts: Callable[[object], Iterable[object]], *, deepest: int | None = None
) -> list[Any]:
    """Every object that `parts` leads to from `roots`, depth first, each once; text and numbers are left out.

    Objects more than `deepest` parts away from a root are left out too.
    """
    visited: dict[int, object] = {}  # holds the objects too, so that no other object gets an id
    waiting = [(root, 0) for root in roots][::-1]
    while waiting and len(visited) < MAX_OBJECTS:
        value, depth = waiting.pop()
        if id(value) not in visited and not isinstance(value, PLAIN):
            visited[id(value)] = value
            if depth != deepest:
                waiting += [(part, depth + 1) for part in parts(value)][::-1]
    return list(visited.values())


def data_inside(roots: Iterable[object]) -> list[object]:
    """`roots` with everything inside lists, dictionaries and plain objects; modules and tensors are not entered."""
    return reachable(roots, _data, deepest=_DEEPEST)


def reachable_generators(model: nn.Module) -> list[object]:
    """Generators that modules hold, directly or inside lists, dictionaries and plain objects; each once."""
    attributes = (item for module in model.modules() for item in vars(module).items())
    inside = data_inside(value for name, value in attributes if name not in OF_TORCH)
    return [value for value in inside if is_generator(value)]


def _data(value: object) -> Iterable[object]:
    if isinstance(value, (Tensor, nn.Module, type, types.ModuleType, *PLAIN)) or is_generator(value):
        return ()
    inside = items(value)
    if inside is None:
        of_torch = type(value).__module__.partition(".")[0] == "torch"
        return () if of_torch and callable(value) else attributes(value).values()
    return inside


def picture(value: object, *, objects: bool = True, versions: bool = False, above: tuple[int, ...] = ()) -> object:
    """A cheap value that differs once an object inside `value` was added, removed or replaced.

    A tensor counts by identity: `versions` adds writes to the tensor. Attributes of objects are entered only if
    `objects`; tensors there count with their writes.
    """
    if isinstance(value, Tensor):
        return (id(value), value._version) if versions else id(value)
    if isinstance(value, PLAIN):
        return value
    if id(value) in above or len(above) > _DEEPEST:
        return None
    inside, address = items(value), 0
    if inside is None:
        if not objects:
            return id(value)
        inside, versions, address = list(_data(value)), True, id(value)
    above = (*above, id(value))
    return (
        type(value),
        address,
        tuple(picture(part, objects=objects, versions=versions, above=above) for part in inside),
    )


class SharedName(NamedTuple):
    """A name in a file or on a class."""

    owner: File | type
    name: str
    path: str

    @property
    def value(self) -> object:
        return self.owner[self.name] if isinstance(self.owner, dict) else vars(self.owner)[self.name]

    def set(self, value: object) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


class SharedNames:
    """Data on classes of the user, in their files, and under names that their code uses in other files of the author.

    State of functions counts too: defaults that are changed in place, attributes, closures of decorators.
    """

    def __init__(self, model: nn.Module) -> None:
        self._classes: dict[type, None] = {}
        self._files: dict[int, File] = {}
        self._elsewhere: dict[tuple[int, str], File] = {}
        self._functions: set[types.FunctionType] = set()
        for module in model.modules():
            self.add(type(module))

    def add(self, kind: type) -> None:
        """Collects the user's classes among the bases of `kind`, and their files."""
        for base in kind.__mro__:
            if base in self._classes or not is_own_module(base.__module__):
                continue
            self._classes[base] = None
            for value in list(vars(base).values()):
                function = _function_of(value)
                if is_own_function(function):
                    self._files[id(function.__globals__)] = function.__globals__
                    self._follow(function)

    def _follow(self, function: types.FunctionType) -> None:
        """Collects names that the code of `function` uses in files that are not walked as a whole."""
        if function in self._functions:
            return
        self._functions.add(function)
        for file, name in referenced_names(function):
            value = file[name]
            if isinstance(value, type) and is_of_author(value):
                self.add(value)
            elif isinstance(value, types.FunctionType) and is_of_author(value):
                self._follow(value)
            elif _is_data(name, value):
                self._elsewhere[id(file), name] = file

    def __iter__(self) -> Iterator[SharedName]:
        """Every name once; classes that are added meanwhile count."""
        for file in list(self._files.values()):
            yield from (SharedName(file, name, name) for name, value in list(file.items()) if _is_data(name, value))
        for (_, name), file in list(self._elsewhere.items()):
            if id(file) not in self._files:
                yield SharedName(file, name, f"{file['__name__']}.{name}")
        done: set[type] = set()
        while left := [kind for kind in self._classes if kind not in done]:
            for kind in left:
                done.add(kind)
                for name, value in list(vars(kind).items()):
                    if _is_data(name, value):
                        yield SharedName(kind, name, f"{kind.__qualname__}.{name}")


def referenced_names(function: types.FunctionType) -> Iterator[tuple[File, str]]:
    """Each name that `function` uses, with the namespace that defines the name: its file or an imported file.

    import helpers                        helpers.Registry, helpers.N_CALLS
    from helpers import Registry, bump    Registry, and the names that `bump` uses
    """
    return _referenced(frozenset(names_in(function.__code__)), function.__globals__, set())


def _referenced(names: Collection[str], file: File, visited: set[int]) -> Iterator[tuple[File, str]]:
    visited.add(id(file))
    for name in names:
        if name in file and not name.startswith("__"):
            yield file, name
            value = file[name]
            if isinstance(value, types.ModuleType) and id(vars(value)) not in visited and is_of_author(value):
                yield from _referenced(names, vars(value), visited)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Globals and attributes that the code and the functions within it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def is_own_function(value: object) -> bool:
    """Whether `value` is a Python function or method from a file of the model's author."""
    function = _function_of(value)
    if not isinstance(function, types.FunctionType):
        return False
    file = function.__code__.co_filename
    return "-packages" not in file and not file.startswith("<") and not (function.__module__ or "").startswith("torch")


def _function_of(value: object) -> Any:
    """The function of a method; any other value unchanged. Attributes are not read, because some raise."""
    return value.__func__ if isinstance(value, (types.MethodType, staticmethod, classmethod)) else value


def is_own_module(name: str) -> bool:
    """Whether the module `name` may hold state of a model: not torch, numpy or the standard library."""
    top = name.partition(".")[0]
    return top == "__main__" or (top not in ("torch", "numpy") and top not in sys.stdlib_module_names)


def is_of_author(value: object) -> bool:
    """Whether a function, class or module comes from a user's file, not from an installed package."""
    if not isinstance(value, (types.ModuleType, type)):
        return is_own_function(value) and (value.__module__ or "").partition(".")[0] not in _WITHOUT_STATE
    module = value if isinstance(value, types.ModuleType) else sys.modules.get(value.__module__)
    file = vars(module) if module is not None else {}
    path, name = file.get("__file__") or "", str(file.get("__name__"))
    return bool(path) and "-packages" not in path and name.partition(".")[0] not in _WITHOUT_STATE


def is_opaque(value: object) -> bool:
    """Whether `value` counts by its type alone, such as a class, a lock or a file.

    From a logger or a lock a walk would reach the whole process.
    """
    if isinstance(value, (type, types.ModuleType, RemovableHandle)):
        return True
    module = type(value).__module__.partition(".")[0]
    return module in sys.stdlib_module_names and module not in _OF_DATA


def _is_data(name: str, value: object) -> bool:
    if is_own_function(value):
        return True
    if name.startswith("__") or name == "_abc_impl" or hasattr(type(value), "__get__"):
        return False
    return not is_opaque(value)
