"""torch.compile beside the instruments: compiled functions run as written while watched, and compiled before and after.

torch skips a compiled frame below a dispatch mode and marks its code, so that it is never compiled again in the
process (torch 2.13, convert_frame.py). `compiler_off` keeps the compiler from seeing such frames. `never_compiled` does
for a function what `torch._disable_dynamo` does, without its import of torch._dynamo (1.65 s) and without a Python
frame at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    _SKIP_ALL: Any = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
except ImportError:  # another torch
    _SKIP_ALL = None


def never_compiled(function: Function) -> Function:
    """`function` and what it calls run outside of torch.compile, also where compiled code calls it."""
    if _SKIP_ALL is None or not isinstance(function, FunctionType):
        return torch._disable_dynamo(function)  # type: ignore[attr-defined, no-any-return, return-value]
    set_code_exec_strategy(function.__code__, _SKIP_ALL)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class DispatchMode(TorchDispatchMode):
    """A mode of an instrument. torch wraps the `__torch_dispatch__` of any other in `torch._disable_dynamo`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in vars(cls):
            cls.__torch_dispatch__ = never_compiled(vars(cls)["__torch_dispatch__"])  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def compiler_off() -> Iterator[list[Any]]:
    """Compiled functions run as written meanwhile, in every thread, and keep all that was compiled before.

    Yields a list that is not empty once such a function was called. May be entered and left inside a compiled call,
    where `torch.compiler.set_stance` raises: an optimizer's hook runs inside a step that is compiled as a whole.
    """
    from torch._dynamo import eval_frame  # late: it takes more than a second; every optimizer imports it too

    called: list[Any] = []
    plain, stance, guard = eval_frame._callback_from_stance, eval_frame._stance, torch._C._ForceDispatchKeyGuard

    def as_written(callback: Any) -> Any:
        if callable(callback):
            called.append(callback)
            with _disable_current_modes():  # pushes them again: a compiled call that ends switches later modes off
                pass
        return plain(callback)

    eval_frame._callback_from_stance = as_written
    eval_frame._stance = eval_frame.DynamoStance("force_eager")
    torch._C._ForceDispatchKeyGuard = _NoGuard  # type: ignore[misc, assignment]
    try:
        yield called
    finally:
        eval_frame._callback_from_stance, eval_frame._stance = plain, stance
        torch._C._ForceDispatchKeyGuard = guard  # type: ignore[misc]


class _NoGuard(nullcontext[None]):
    """At the end of a compiled call torch switches on again what was on at its beginning; not where it ran as written:
    a mode that left the stack meanwhile would leave torch looking for one."""

    def __init__(self, include: Any, exclude: Any) -> None:
        super().__init__()
