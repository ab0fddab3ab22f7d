"""What things keep where no attribute shows it: functions in their cells and defaults, generators in their state."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch


def state_of_itself(value: Any) -> Any:
    """Where a random generator of torch, Python or numpy stands; None for what is none."""
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
    """What a function, a method or a partial carries along; None for everything else.

    Functions of installed packages are taken by name: what a library keeps for itself is no memory of the model.
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
    """The function of a method; everything else as it is, without a look at its attributes: some raise."""
    return value.__func__ if isinstance(value, (types.MethodType, staticmethod, classmethod)) else value


def is_own_function(value: Any) -> bool:
    """Whether it is written in Python in a file of the model's author."""
    function = function_of(value)
    if not isinstance(function, types.FunctionType):
        return False
    file = function.__code__.co_filename
    return "-packages" not in file and not file.startswith("<") and not (function.__module__ or "").startswith("torch")


def is_own_module(name: str) -> bool:
    """Whether what stands there may remember something of a model: not torch's, not the standard library's."""
    top = name.partition(".")[0]
    return top == "__main__" or (top not in ("torch", "numpy") and top not in sys.stdlib_module_names)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a cell that is still empty
        return None
