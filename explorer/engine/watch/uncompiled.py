"""Makes compiled functions run as written while an instrument watches, and compiled before and after.

torch skips a compiled frame below a dispatch mode and marks its code, which the process then never compiles again
(torch 2.13, convert_frame.py). `compiler_off` keeps the compiler from such frames. `never_compiled` acts like
`torch._disable_dynamo`, without the import of torch._dynamo (1.65 s) and without a Python frame at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, TypeVar

import torch
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


class DispatchMode(TorchDispatchMode):
    """A mode of an instrument. torch wraps the `__torch_dispatch__` of any other in `torch._disable_dynamo`."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "__torch_dispatch__" in vars(cls):
            cls.__torch_dispatch__ = never_compiled(vars(cls)["__torch_dispatch__"])  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextmanager
def compiler_off() -> Iterator[list[object]]:
    """Makes compiled functions run as written inside, in every thread; earlier compilations stay valid.

    Yields a list that fills once a compiled function is called. The context works inside a compiled call too, where
    `torch.compiler.set_stance` raises: an optimizer's hook may run inside a compiled step.
    """
    from torch._dynamo import eval_frame  # late: it takes more than a second; every optimizer imports it too

    called: list[object] = []
    plain, stance, guard = eval_frame._callback_from_stance, eval_frame._stance, torch._C._ForceDispatchKeyGuard

    def as_written(callback: Any) -> Any:
        if callable(callback):
            called.append(callback)
            with _disable_current_modes():  # re-pushes the modes: the end of a compiled call switches later ones off
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
    """Stops torch from restoring dispatch keys at the end of a compiled call that ran as written: torch would look for
    a mode that has left the stack meanwhile."""

    def __init__(self, include: object, exclude: object) -> None:
        super().__init__()
