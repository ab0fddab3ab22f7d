"""Runs a function of the engine in a process of its own: what it takes, breaks or patches ends with it.

this process  ── function, arguments ──▶  forked from a clean process (forks.py)
              ◀── progress as lines of JSON, then what it returned or raised ──
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any, TypeVar

from explorer.child_process.forks import Forked, at_hand, server_is_gone
from explorer.engine.device.free_memory import n_oom_kills
from explorer.engine.device.limits import limited_by_machine
from explorer.errors import Crashed, ExplorerError
from explorer.record.base import from_json, to_json
from explorer.record.progress import Progress, Report

_POLL_S = 0.25

Kind = TypeVar("Kind")


def apart(
    function: Callable[..., Kind], *arguments: object, report: Report, what: str, limit_s: float | None = None
) -> Kind | None:
    """`function(*arguments, report)`; None: the system ended its process for lack of memory.

    `function` is found by its name, `arguments` and result are pickled, `what` says in an error what the process did.
    Raises what the function raised of explorer/errors.py, what `report` raises, and Crashed where the process ended
    otherwise, or was not done within `limit_s`.
    """
    n_before = n_oom_kills()
    with tempfile.TemporaryFile() as result, os.fdopen((pipe := os.pipe())[0], "rb", buffering=0) as said:
        where = (function.__module__, function.__qualname__)
        process = at_hand().start(
            run_apart, where, arguments, files=[pipe[1], result.fileno()], needs=["torch._dynamo"]
        )
        os.close(pipe[1])
        try:
            over = _listen(process, said, report, limit_s)
        finally:
            process.close()
        if not over:
            raise Crashed(
                f"The process that {what} was not done after {limit_s:g} s.", hint="Allow more with --time-limit."
            )
        if process.code == 0:
            return _read(result)
        if process.code == -signal.SIGKILL and n_before is not None and (n_oom_kills() or 0) > n_before:
            return None
        if process.code is None:
            raise server_is_gone()
        raise Crashed(
            f"The process that {what} ended with exit code {process.code}.",
            hint="What it wrote before that says why; the next run starts a new one.",
        )


def _listen(process: Forked, said: IO[bytes], report: Report, limit_s: float | None) -> bool:
    """Passes on its progress until it has ended; `report` may raise to end it all. False: its time was up first."""
    lines, last = bytearray(), Progress(what="starting", done=0, total=0)
    deadline = None if limit_s is None else time.monotonic() + limit_s
    while deadline is None or time.monotonic() < deadline:
        over = process.ended  # asked first: what it said before that is in the pipe
        ready, _, _ = select.select([said], [], [], 0 if over else _POLL_S)
        chunk = said.read(65_536) if ready else b""
        lines += chunk or b""
        while (end := lines.find(b"\n")) >= 0:
            last = from_json(bytes(lines[:end]), Progress)
            report(last)
            del lines[: end + 1]
        if over and not chunk:
            return True
        if not ready:
            report(last)
        elif not chunk:
            process.wait(_POLL_S)
    return False


def _read(result: IO[bytes]) -> Any:
    result.seek(0)
    found = pickle.load(result)
    if isinstance(found, ExplorerError):
        raise found
    return found


def run_apart(where: tuple[str, str], arguments: tuple[object, ...], voice: int, result: int) -> None:
    """The child's side."""

    def report(progress: Progress) -> None:
        os.write(voice, to_json(progress) + b"\n")

    found: object
    try:
        with limited_by_machine():
            found = getattr(importlib.import_module(where[0]), where[1])(*arguments, report)
    except ExplorerError as error:
        found = error
    with os.fdopen(result, "wb") as file:
        pickle.dump(found, file)
