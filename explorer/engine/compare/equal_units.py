"""Units that can remember nothing. Of several equal ones the probe repeats only the first in full.

The methods of such a unit's classes assign to local variables and name only torch, math and a few builtins. Its modules
hold only tensors, plain values and containers of them. A package, a hook, a descriptor or a function of the user's own
leaves the unit without a signature. Any doubt does: then each unit runs in full.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Hashable, Sequence
from functools import cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from explorer.engine.state.reachable import PLAIN, cell_contents, is_own_module, items

_NAMES = str.split("abs bool enumerate float int isinstance len max min range reversed sum super tuple zip")
_WRITES = ("IMPORT", "DELETE", "STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "STORE_SLICE")
_OF_CLASSES = str.split("__module__ __doc__ __annotations__ __static_attributes__ __firstlineno__")


@cache
def _refused(of_modules: frozenset[str]) -> frozenset[str]:
    """Attributes that change a module or a container, and those of torch that lead to other packages and to files."""
    containers = {*vars(dict), *vars(list), *vars(set)}
    to_files = {"ops", "classes", "save", "load", "from_file"}
    return (of_modules | containers | to_files) - {"forward", "to", "float", "half"}


def _is_refused(name: str) -> bool:
    """Whether code that reads this attribute may remember something. Packages add methods to torch's Module."""
    return name in _refused(frozenset(vars(nn.Module)))


def signature(modules: Sequence[nn.Module], inputs: object) -> Hashable | None:
    """Equal for units that compute the same but for the values of their tensors; None if the unit may remember."""
    parts = [part for root in modules for part in root.named_modules()]
    attributes = [{**vars(module), "_modules": ()} for _, module in parts]
    owners = {torch, functional, Tensor, *(base for _, module in parts for base in type(module).__mro__)}
    try:
        shapes = _shape((inputs, attributes))
    except TypeError:
        return None
    if _has_any_global_hook() or not all(map(_only_computes, owners)):
        return None
    return shapes, *((name, type(module)) for name, module in parts)


def _shape(value: Any) -> Hashable:
    """A value but for the contents of tensors. Raises TypeError for what may remember, such as a function."""
    inside = items(value)
    if inside is not None:
        return tuple(value) if isinstance(value, dict) else len(inside), *map(_shape, inside)
    if type(value) in (Tensor, nn.Parameter) and not vars(value):
        return value.shape, value.dtype, value.requires_grad
    if isinstance(value, (*PLAIN, torch.dtype, torch.device)):
        return repr(value)
    raise TypeError(value)


def _only_computes(owner: object) -> bool:
    """Whether a class has methods alone that remember nothing. Torch is trusted unless a function that code may call
    was replaced."""
    functions = {name: value for name, value in vars(owner).items() if isinstance(value, FunctionType)}
    if not is_own_module(getattr(owner, "__module__", "torch")):
        # A decorator copies the name of a function, but not its globals. Torch itself decorates private ones.
        called = (function for name, function in functions.items() if name[0] != "_" and not _is_refused(name))
        return not any(is_own_module(str(function.__globals__["__name__"])) for function in called)
    return {*functions, *_OF_CLASSES} >= {*vars(owner)} and all(map(_names_torch_alone, functions.values()))


def _names_torch_alone(method: FunctionType) -> bool:
    if method.__name__ == "__init__":
        return True
    values = [*(method.__defaults__ or ()), *(method.__kwdefaults__ or {}).values(), *cell_contents(method)]
    codes, names = [method.__code__], set[str]()
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        names |= {*code.co_names}
    kinds = {instruction.opname for code in codes for instruction in dis.get_instructions(code)}
    if any(kind.startswith(_WRITES) for kind in kinds):
        return False
    is_plain = all(isinstance(value, (type, *PLAIN)) for value in values)
    return is_plain and all(map(partial(_is_harmless, method.__globals__), names))


def _is_harmless(file: dict[str, object], name: str) -> bool:
    """Whether a global or an attribute of this name leads to no memory."""
    if name in file:
        value = file[name]
        return isinstance(value, ModuleType) and value.__name__.partition(".")[0] in ("torch", "math")
    return name in _NAMES or not (hasattr(builtins, name) or name.startswith("_") or _is_refused(name))
