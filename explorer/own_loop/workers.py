"""Processes that a script starts with torch.multiprocessing: what they call is watched there.

    the script ── Process(target=function) ──▶ WatchedFunction(function) ──▶ a ScriptUnderWatch of the process

script.py is about one process. A process that is spawned shares nothing with it, and a forked one shares its hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

_SPAWN = "torch.multiprocessing.spawn"
_LIBRARIES = ("torch", "multiprocessing", "concurrent", "lightning", "accelerate", "joblib")
"""Their processes load data or manage others; a function of a script trains."""
Watching = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class WatchedFunction:
    """A function of a script, called while `watching`. It is pickled into the process that calls it."""

    function: Callable[..., object]
    watching: Watching
    to_stderr: bool
    """Whether stdout is kept free for a document."""

    def __call__(self, *args: Any) -> object:
        with redirect_stdout(sys.stderr) if self.to_stderr else nullcontext(), self.watching():
            return self.function(*args)


@contextmanager
def watched_workers(watching: Watching) -> Iterator[None]:
    """Wraps what the processes of a script call in `watching`, which can be pickled."""
    plain = BaseProcess.__init__

    def made(process: Any, *args: Any, **kwargs: Any) -> None:
        plain(process, *args, **kwargs)
        to_stderr = sys.stdout is sys.stderr
        module = str(getattr(process._target, "__module__", "torch"))
        if module == _SPAWN:
            function, *rest = process._args
            process._args = (WatchedFunction(function, watching, to_stderr), *rest)
        elif module.partition(".")[0] not in _LIBRARIES and not process._kwargs:
            process._target = WatchedFunction(process._target, watching, to_stderr)

    BaseProcess.__init__ = made  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        BaseProcess.__init__ = plain  # type: ignore[method-assign]
