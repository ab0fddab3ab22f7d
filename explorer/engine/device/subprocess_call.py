"""Calls a function of the engine in a forked process: its memory and its changes of state end with the process.

this process  ── function, arguments ──▶  forked from a clean process (forks.py)
              ◀── progress as lines of JSON, then the result or the error ──

`rank_processes` starts one process a rank, whose results are files.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from msgspec.structs import replace

from explorer.child_process.forks import Answering, Forked, at_hand, server_is_gone
from explorer.engine.device.memory_limit import machine_memory_limit
from explorer.errors import Crashed, ExplorerError
from explorer.record.base import from_json, to_json
from explorer.record.plan import Progress, Report

POLL_S = 0.2
Kind = TypeVar("Kind")


def call_in_subprocess(function: Callable[..., Kind], *arguments: object, report: Report, what: str) -> Kind | None:
    """Result of `function(*arguments, report)`; None if the system ended the process for lack of memory.

    `function` is looked up by name, `arguments` and result are pickled, and `what` names the work in errors.
    Raises the function's error if it is of explorer/errors.py, and what `report` raises. Raises Crashed if the process
    ended otherwise.
    """
    if not hasattr(os, "fork"):
        return function(*arguments, report)
    last = Progress(what="starting", done=0, total=0)
    where = (function.__module__, function.__qualname__)
    with (
        tempfile.TemporaryFile() as result,
        Answering(answer_call, where, arguments, files=[result.fileno()], needs=["torch._dynamo"]) as child,
    ):

        def alive() -> None:
            report(last)

        for line in child.lines(alive):
            last = from_json(line, Progress)
            report(last)
            last = replace(last, part=b"")
        if child.code == 0:
            result.seek(0)
            outcome: Any = pickle.load(result)
            if isinstance(outcome, ExplorerError):
                raise outcome
            return outcome  # type: ignore[no-any-return]
        if child.code == -signal.SIGKILL and child.out_of_memory:
            return None
        if child.code is None:
            raise server_is_gone()
        raise Crashed(f"The run that {what} {child.ending()}.", hint="The next run starts a new process.")


@contextmanager
def rank_processes(
    body: Callable[..., None], arguments: Sequence[tuple[object, ...]], needs: Sequence[str]
) -> Iterator[list[Forked]]:
    """Starts `body(*arguments[rank])` in a process for each rank. At the end of the block all of them are gone."""
    ranks: list[Forked] = []
    try:
        for of_rank in arguments:
            ranks.append(at_hand().start(body, *of_rank, needs=needs))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.close()


def wait_for_ranks(ranks: Sequence[Forked], time_limit_s: float, report: Report) -> bool:
    """Waits until all ranks have ended or one has failed. Returns False if the time limit comes first."""
    begun = time.monotonic()
    while alive := [process for process in ranks if not process.ended]:
        if any(process.ended and process.code != 0 for process in ranks):
            return True
        if time.monotonic() - begun > time_limit_s:
            return False
        n_done = len(ranks) - len(alive)
        report(Progress(what=f"{len(alive)} of {len(ranks)} ranks at work", done=n_done, total=len(ranks)))
        select.select(alive, [], [], POLL_S)
    return True


def one_thread_between_steps() -> None:
    """One thread builds, copies and compares models in a process of a job; a step sets the thread count of its spec.

    Threads that wait actively between small operators doubled the CPU time before the first timeline.
    """
    torch.set_num_threads(1)


def answer_call(where: tuple[str, str], arguments: tuple[object, ...], answers: int, result: int) -> None:
    """Calls the function in the child process and pickles its result or error."""
    one_thread_between_steps()

    def report(progress: Progress) -> None:
        os.write(answers, to_json(progress) + b"\n")

    outcome: object
    try:
        with machine_memory_limit():
            outcome = getattr(importlib.import_module(where[0]), where[1])(*arguments, report)
    except ExplorerError as error:
        outcome = error
    with os.fdopen(result, "wb") as file:
        pickle.dump(outcome, file)
