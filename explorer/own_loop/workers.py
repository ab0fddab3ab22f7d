"""Processes that a script starts with torch.multiprocessing: each is watched there, and leaves the names of its files.

    the script ── Process(target=function) ──▶ WatchedFunction(function) ──▶ a ScriptUnderWatch of the process
               ◀── a file in a common folder: number of the step, path of its record ──┘

script.py is about one process. A process that is spawned shares nothing with it, and a forked one shares its patches.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from explorer.own_loop.watch_request import WatchRequest

_SPAWN = "torch.multiprocessing.spawn"
_LIBRARIES = ("torch", "multiprocessing", "concurrent", "lightning", "accelerate", "joblib")
"""Their processes load data or manage others; a function of a script trains."""


class HasFiles(Protocol):
    """What watches a script: the files that it has written, by step."""

    @property
    def written(self) -> dict[int, Path]: ...


Watching = Callable[[Path, WatchRequest], AbstractContextManager[HasFiles]]


@dataclass(frozen=True, kw_only=True)
class WatchedFunction:
    """A function of a script, called with its steps recorded. It is pickled into the process that calls it."""

    function: Callable[..., object]
    watching: Watching
    script: Path
    request: WatchRequest
    folder: Path

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        watched = None
        try:
            with self.watching(self.script, self.request) as watched:
                return self.function(*args, **kwargs)
        finally:
            if watched is not None:
                lines = [f"{step} {path.resolve()}\n" for step, path in watched.written.items()]
                (self.folder / str(os.getpid())).write_text("".join(lines))


@contextmanager
def watched_workers(script: Path, request: WatchRequest, watching: Watching) -> Iterator[dict[int, Path]]:
    """Wraps what the script's processes call in `watching`, which they find by its name.

    After the script, the yielded dictionary has a record of each step."""
    plain = BaseProcess.__init__
    written: dict[int, Path] = {}
    with tempfile.TemporaryDirectory() as folder:

        def wrapped(function: Callable[..., object]) -> WatchedFunction:
            # The caller's functions stay here: they cannot be pickled.
            quiet = replace(request, say=say_in_worker, recorded=_print_nothing)
            return WatchedFunction(
                function=function, watching=watching, script=script, request=quiet, folder=Path(folder)
            )

        def made(process: BaseProcess, *args: Any, **kwargs: Any) -> None:
            plain(process, *args, **kwargs)
            target = getattr(process, "_target", None)
            module = str(getattr(target, "__module__", ""))
            if module == _SPAWN:
                function, *rest = process._args  # type: ignore[attr-defined]
                process._args = (wrapped(function), *rest)  # type: ignore[attr-defined]
            elif target is not None and module.partition(".")[0] not in _LIBRARIES:
                process._target = wrapped(target)  # type: ignore[attr-defined]

        BaseProcess.__init__ = made  # type: ignore[assignment, method-assign]
        try:
            yield written
        finally:
            BaseProcess.__init__ = plain  # type: ignore[method-assign]
            lines = [line for note in Path(folder).iterdir() for line in note.read_text().splitlines()]
            for line in sorted(lines, reverse=True):  # of several ranks the first
                step, _, path = line.partition(" ")
                written[int(step)] = Path(os.path.relpath(path))


def say_in_worker(text: str) -> None:
    """To stderr, which all processes share."""
    print(text, file=sys.stderr, flush=True)


def _print_nothing(run: object, path: Path) -> None:
    """The script's process prints the record, once."""
