"""Dispatch modes of the instruments: which calls of torch they note, and what torch.compile does meanwhile.

A dispatch mode gets more than operators. `is_noted` and the functions beside it answer for all of these:

    operator                  has a schema and tags
    question for metadata     a nested tensor asks the mode for its size, from C++, where an exception ends the process
    higher-order operator     cond, flex_attention: takes functions; no schema, no overload, no dot in its name

Compiled functions run as written while an instrument watches, and compiled before and after. torch skips a compiled
frame below a dispatch mode and marks its code, which the process then never compiles again (torch 2.13,
convert_frame.py). `compiler_off` keeps the compiler from such frames. `never_compiled` acts like
`torch._disable_dynamo`, without the import of torch._dynamo (1.65 s) and without a Python frame at each call.

Higher-order operators are the exception. torch compiles them at each call with a compiler that changes no kernel, and
their backward fails if it cannot (torch/_higher_order_ops/utils.py). It may do so while a mode is on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from types import FunctionType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch._higher_order_ops import utils as higher_order
from torch._ops import OpOverload
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Function = TypeVar("Function", bound=Callable[..., object])

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    _SKIP_ALL: Any = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
except ImportError:  # another torch
    _SKIP_ALL = None


def never_compiled(function: Function) -> Function:
    """Makes `function` and its callees run outside of torch.compile, also if compiled code calls `function`."""
    if _SKIP_ALL is None or not isinstance(function, FunctionType):
        return torch._disable_dynamo(function)  # type: ignore[attr-defined, no-any-return, return-value]
    set_code_exec_strategy(function.__code__, _SKIP_ALL)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def is_higher_order(func: object) -> bool:
    """Whether `func` takes functions, as torch.cond does. Such an operator has no schema and no tags."""
    return not isinstance(func, OpOverload)


@cache
def is_noted(func: Any) -> bool:
    """Whether `func` computes or writes something. False for a question for metadata, such as a nested tensor's size.

    An instrument passes questions on at once: torch may ask from C++, where an exception would end the process.
    """
    if is_higher_order(func):
        return True
    if func.namespace == "prim":
        return False
    schema = func._schema
    makes_tensor = any("Tensor" in str(value.type) for value in schema.returns)
    reads_value = torch.Tag.data_dependent_output in func.tags
    return makes_tensor or reads_value or schema.is_mutable or not schema.returns


def draws_numbers(func: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def writes_arguments(func: Any) -> bool:
    """Whether an operator writes into an argument, by its schema."""
    return not is_higher_order(func) and bool(func._schema.is_mutable)


def is_in_place(func: object) -> bool:
    """Whether no storage is born or resized: `mul_`, but not `resize_` and `set_`. Optimizers call little else."""
    name = str(getattr(getattr(func, "_schema", None), "name", ""))
    return name.endswith("_") and "resize" not in name and not name.endswith("::set_")


def packet_name(func: Any) -> str:
    """Name of an operator without namespace and overload: `add` for aten.add.Tensor."""
    return str(getattr(func, "overloadpacket", func).__name__)


@cache
def is_composite(func: Any) -> bool:
    """Whether an operator only calls other operators."""
    if is_higher_order(func) or not torch._C._dispatch_has_kernel(func.name()):
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


class DispatchMode(TorchDispatchMode):
    """A mode of an instrument. Its `__torch_dispatch__` gets what `is_noted`, everything else runs unseen.

    torch wraps the `__torch_dispatch__` of any other mode in `torch._disable_dynamo`.
    """

    supports_higher_order_operators = True
    notes_higher_order = False
    """Whether `__torch_dispatch__` gets higher-order operators too."""
    selects_itself = False
    """Whether `__torch_dispatch__` gets every call: a filter takes a Python frame at each operator."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in vars(cls):
            plain = vars(cls)["__torch_dispatch__"]
            filtered = plain if cls.selects_itself else _filtered(plain)
            cls.__torch_dispatch__ = never_compiled(filtered)  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether torch may compile below the mode now. torch asks each mode on the stack, and reads two flags."""
        return _n_compiling > 0

    def __enter__(self) -> Self:
        _let_operators_compile(1)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        _let_operators_compile(-1)
        super().__exit__(*exc)


def _filtered(plain: Callable[..., object]) -> Callable[..., object]:
    @wraps(plain)
    def torch_dispatch(mode: Any, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if not is_noted(func) or (is_higher_order(func) and not mode.notes_higher_order):
            return func(*args, **(kwargs or {}))
        return plain(mode, func, types, args, kwargs)

    never_compiled(plain)
    return torch_dispatch


_ENVIRONMENT = higher_order._set_compilation_env
_STANCES: list[object] = []
"""The compiler's stance outside of each `compiler_off`, the first one the user's."""


_n_open = 0
"""Open modes and `compiler_off`s."""
_n_compiling = 0
"""Higher-order operators that torch is compiling."""


def _let_operators_compile(change: int) -> None:
    """While a mode or a `compiler_off` is open, torch enters our context instead of its own."""
    global _n_open
    _n_open += change
    higher_order._set_compilation_env = _compilation_of_operators if _n_open else _ENVIRONMENT  # type: ignore[assignment]


def _hinder_compiler(hindered: bool) -> None:
    """Sets torch's two flags for a mode below which frames are skipped: one is read in Python, one in C++."""
    flags = vars(_python_dispatch)
    flags["_is_in_any_mode_without_ignore_compile_internals"] = hindered
    flags["set_is_in_mode_without_ignore_compile_internals"](hindered)


@contextmanager
def _compilation_of_operators() -> Iterator[None]:
    """The context in which torch compiles a higher-order operator: no mode and no `compiler_off` hinders it."""
    from torch._dynamo import eval_frame

    global _n_compiling
    is_hindered = _python_dispatch.is_in_any_mode_without_ignore_compile_internals()
    stance = eval_frame._stance
    eval_frame._stance = _STANCES[0] if _STANCES else stance  # type: ignore[assignment]
    _hinder_compiler(False)
    _n_compiling += 1
    try:
        with _ENVIRONMENT():
            yield
    finally:
        _n_compiling -= 1
        _hinder_compiler(is_hindered)
        eval_frame._stance = stance


@contextmanager
def compiler_off() -> Iterator[None]:
    """Makes compiled functions run as written inside, in every thread; earlier compilations stay valid.

    The context works inside a compiled call too, where
    `torch.compiler.set_stance` raises: an optimizer's hook may run inside a compiled step.
    """
    from torch._dynamo import eval_frame  # late: it takes more than a second; every optimizer imports it too

    stance = eval_frame._stance
    eval_frame._stance = eval_frame.DynamoStance("force_eager")
    _STANCES.append(stance)
    _let_operators_compile(1)
    try:
        with before_compiled():
            yield
    finally:
        _let_operators_compile(-1)
        _STANCES.pop()
        eval_frame._stance = stance


@contextmanager
def before_compiled(begins: Callable[[object, bool], object] = lambda function, compiled: None) -> Iterator[None]:
    """Calls `begins` before each call of a compiled function, with the function, and whether it will run compiled."""
    from torch._dynamo import config, eval_frame

    plain, guard = eval_frame._callback_from_stance, torch._C._ForceDispatchKeyGuard

    def announced(callback: Any) -> Any:
        if callable(callback) and not _n_compiling:
            compiles = eval_frame._stance.stance != "force_eager" and not config.disable
            begins(sys._getframe(1).f_locals.get("fn"), compiles)
            with _disable_current_modes():  # re-pushes the modes: the end of a compiled call switches later ones off
                pass
        return plain(callback)

    def no_guard(include: object, exclude: object) -> AbstractContextManager[None]:
        # At the end of a compiled call, torch would look for a mode that has left the stack meanwhile.
        is_of_compiler = sys._getframe(1).f_code.co_filename == eval_frame.__file__
        return nullcontext() if is_of_compiler else guard(include, exclude)  # type: ignore[arg-type]

    eval_frame._callback_from_stance = announced
    torch._C._ForceDispatchKeyGuard = no_guard  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        eval_frame._callback_from_stance = plain
        torch._C._ForceDispatchKeyGuard = guard  # type: ignore[misc]


def is_call_of_module(function: object) -> bool:
    """Whether a compiled function is a call of a module, and not code that may hold a backward."""
    wrapped = getattr(function, "__wrapped__", function)
    if isinstance(wrapped, nn.Module):
        return True
    is_call = getattr(wrapped, "__name__", "") in ("forward", "_call_impl", "_wrapped_call_impl", "__call__")
    return is_call and isinstance(getattr(wrapped, "__self__", None), nn.Module)
