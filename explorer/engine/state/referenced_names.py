"""Names that a model's code uses, in its own file and in imported files of its author.

    import helpers                        helpers.Registry, helpers.N_CALLS
    from helpers import Registry, bump    Registry, and the names that `bump` uses

Unused names are left out: a data set in an imported file is no state of the model. Installed packages are left out.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Iterator
from typing import Any

from explorer.engine.state.closures import is_own_function

File = dict[str, Any]
_NOBODYS = sys.stdlib_module_names | {__name__.partition(".")[0]}
"""Packages that hold no state of a model. This package is named because a checkout is not installed."""


def referenced_names(function: types.FunctionType) -> Iterator[tuple[File, str]]:
    """Each name that `function` uses, with the namespace that defines the name: its file or an imported file."""
    return _named(frozenset(names_in(function.__code__)), function.__globals__, set())


def is_of_author(thing: Any) -> bool:
    """Whether a function, class or module comes from a user's file, not from an installed package."""
    if isinstance(thing, types.ModuleType):
        return _is_own_file(vars(thing))
    if isinstance(thing, type):
        return _is_own_file(vars(sys.modules.get(thing.__module__, types.ModuleType(""))))
    return is_own_function(thing) and (thing.__module__ or "").partition(".")[0] not in _NOBODYS


def _is_own_file(file: File) -> bool:
    path, name = file.get("__file__") or "", str(file.get("__name__"))
    return bool(path) and "-packages" not in path and name.partition(".")[0] not in _NOBODYS


def _named(names: Collection[str], file: File, seen: set[int]) -> Iterator[tuple[File, str]]:
    seen.add(id(file))
    for name in names:
        if name in file and not name.startswith("__"):
            yield file, name
            thing = file[name]
            if isinstance(thing, types.ModuleType) and id(vars(thing)) not in seen and is_of_author(thing):
                yield from _named(names, vars(thing), seen)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Globals and attributes that the code and the functions within it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)
