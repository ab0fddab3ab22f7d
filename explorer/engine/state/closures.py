"""State that no attribute shows: cells and defaults of functions, states of generators."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch


def state_of_itself(value: Any) -> Any:
    """The state of a random generator of torch, Python or numpy; None for any other value."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if not type(value).__module__.startswith("numpy.random"):
        return None
    if hasattr(value, "get_state"):
        return value.get_state(legacy=False)
    return getattr(getattr(value, "bit_generator", value), "state", None)


def captured(value: Any) -> Iterable[Any] | None:
    """Values that a function, a method or a partial holds; None for any other value.

    Functions of installed packages count by name alone: the state of a library is no state of the model.
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
    return value.__qualname__, list(map(_content, value.__closure__ or ())), defaults, dict(vars(value))


def function_of(value: Any) -> Any:
    """The function of a method; any other value unchanged. Attributes are not read, because some raise."""
    return value.__func__ if isinstance(value, (types.MethodType, staticmethod, classmethod)) else value


def is_own_function(value: Any) -> bool:
    """Whether `value` is a Python function from a file of the model's author."""
    function = function_of(value)
    if not isinstance(function, types.FunctionType):
        return False
    file = function.__code__.co_filename
    return "-packages" not in file and not file.startswith("<") and not (function.__module__ or "").startswith("torch")


def is_own_module(name: str) -> bool:
    """Whether the module `name` may hold state of a model: not torch, numpy or the standard library."""
    top = name.partition(".")[0]
    return top == "__main__" or (top not in ("torch", "numpy") and top not in sys.stdlib_module_names)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a cell that is still empty
        return None
