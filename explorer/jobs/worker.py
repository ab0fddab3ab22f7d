"""The worker: answers every request in a separate, warm and clean process.

In this room only this file and answers.py import the engine, inside functions. Only the fork server and its jobs hold
torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import platformdirs

from explorer import slices
from explorer.child_process.forks import WARM
from explorer.errors import Cancelled, NotSaved
from explorer.jobs import protocol
from explorer.jobs.run_file import graph_of, is_kept, with_graph
from explorer.jobs.store import Store, make_private_folder
from explorer.record.base import Record, from_msgpack, to_msgpack
from explorer.record.failure import failure_of
from explorer.record.plan import Progress, Report

ALL_WARM = (*WARM, *(module for part in slices.parts("jobs").values() for module in part.WARM))
"""Modules that the server of jobs imports while it is idle."""


def answer(request: protocol.Request, report: Report) -> Record:
    """The engine's answer to a request, within the memory of the machine. Raises the engine's errors."""
    from explorer.engine.device.memory_limit import machine_memory_limit
    from explorer.engine.device.subprocess_call import one_thread_between_steps

    one_thread_between_steps()
    row = protocol.ROWS[type(request)]
    function = getattr(import_module(row.module), row.function)
    with machine_memory_limit():
        return function(request, report)  # type: ignore[no-any-return]


def needs_of(request: protocol.Request) -> tuple[str, ...]:
    """Modules that the server imports before the job starts. A first graph waits for the first module only."""
    match request:
        case protocol.FindPlans(wish=wish):
            return WARM[: 3 if wish.card else 1]
        case protocol.Describe() | protocol.Measure(with_graph=True):
            return WARM[:1]
        case protocol.Measure() | protocol.Compare():
            return WARM[:3]
    needs = protocol.ROWS[type(request)].needs
    return ALL_WARM if needs is None else needs


def settings() -> dict[str, str]:
    """Environment variables of the worker, where the person has set none."""
    # cuBLAS reads this once, when CUDA starts; without it equal runs differ.
    chosen = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with contextlib.suppress(OSError):  # without such a folder each job compiles for itself
        # torch.compile loads code from there, so no folder will do in which another user could write first.
        folder = platformdirs.user_cache_path("checkpoint-explorer", appauthor=False) / "torchinductor"
        make_private_folder(folder)
        folder.chmod(0o700)  # refused for another user's folder
        chosen["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return chosen


def do_job(submitted: bytes, store_path: str, folder: str, events: int, cancels: int) -> None:
    """Runs one job, inside the job's process."""
    work(answer, store_path, from_msgpack(submitted, protocol.Submit), folder, (events, cancels))


Answers = Callable[[protocol.Request, Report], Record]


def work(answer: Answers, store_path: str, submitted: protocol.Submit, folder: str, files: tuple[int, int]) -> None:
    """Answers one request; its result is stored before it is announced.

    `folder` takes temporary files; `files` are events and cancels.
    """
    tempfile.tempdir = folder
    with contextlib.suppress(OSError):  # when memory runs out the system shall end this process, not the app
        Path("/proc/self/oom_score_adj").write_text("900")
    events, cancels = os.fdopen(files[0], "wb"), files[1]
    pid, ends_s = os.getpid(), time.monotonic() + protocol.time_limit_s(submitted.request)

    def report(progress: Progress) -> None:
        if os.getpid() != pid:  # a model forked, and its copy of this process came back
            os._exit(0)
        if time.monotonic() > ends_s:
            raise protocol.timed_out(submitted.request)
        if select.select([cancels], [], [], 0)[0]:
            raise Cancelled("The run was cancelled.")
        protocol.write_frame(events, protocol.Reported(progress=progress))

    event = event_of(answer, submitted, store_path, report)
    if os.getpid() == pid:
        protocol.write_frame(events, event)


def event_of(answer: Answers, submitted: protocol.Submit, store_path: str, report: Report) -> protocol.Event:
    """The result of a request, which is in the store then, or the failure."""
    try:
        report(Progress(what="starting", done=0, total=0))
        result = answer(submitted.request, report)
        result = with_graph(result, graph_of(result) or submitted.graph)
        encoded = to_msgpack(result)
        run_id, warning = _keep(result, encoded, store_path) if submitted.keep else (None, "")
        return protocol.Finished(result=encoded, run_id=run_id, warning=warning)
    except BaseException as error:  # a model may raise SystemExit, or its own exception
        return protocol.Failed(failure=failure_of(error, in_step=False))


def _keep(result: Record, encoded: bytes, store_path: str) -> tuple[str | None, str]:
    if not is_kept(result):
        return None, ""
    try:
        return Store(store_path).save(result, encoded=encoded), ""
    except NotSaved as error:
        return None, str(error)


@dataclass(frozen=True)
class WorkerProgram:
    """The function that a job's process runs, and the modules that the fork server imports ahead."""

    run: Callable[[bytes, str, str, int, int], None]
    warm: tuple[str, ...] = ()
    needs: Callable[[protocol.Request], tuple[str, ...]] = lambda request: ()


ENGINE = WorkerProgram(do_job, ALL_WARM, needs_of)
