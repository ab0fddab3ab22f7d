"""A job inside its process: work, progress, a polite end, and the result stored before its announcement.

events    ── Reported ..., then one of Finished / Failed ──▶  the worker
cancels   ◀── a byte: the next report raises Cancelled ─────
"""

from __future__ import annotations

import contextlib
import os
import select
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from explorer.errors import Cancelled, NotSaved
from explorer.jobs.failures import failure_of_job
from explorer.jobs.protocol import Event, Failed, Finished, Reported, Request, Submit, time_limit_s, write_frame
from explorer.jobs.run_file import is_kept, with_graph
from explorer.jobs.store import Store
from explorer.record.base import Record, to_msgpack
from explorer.record.plan import Progress, Report

Answer = Callable[[Request, Report], Record]
"""Does the work of a request: describe, measure, compare, ..."""


def work(answer: Answer, store_path: str | None, submitted: Submit, folder: str, files: tuple[int, int]) -> None:
    """Answers one request. `folder` takes its temporary files; `files` are events and cancels."""
    tempfile.tempdir = folder
    be_first_to_go()
    events, cancels = os.fdopen(files[0], "wb"), files[1]
    clock = _Clock(time_limit_s(submitted.request))

    pid = os.getpid()

    def report(progress: Progress) -> None:
        if os.getpid() != pid:  # a model forked, and its copy of this process came back
            os._exit(0)
        clock.check()
        if select.select([cancels], [], [], 0)[0]:
            raise Cancelled("The run was cancelled.")
        write_frame(events, Reported(job=submitted.job, progress=progress))

    try:
        report(Progress(what="starting", done=0, total=0))
        result = with_graph(answer(submitted.request, report), submitted.graph)
        encoded = to_msgpack(result)
        run_id, warning = _keep(result, encoded, store_path) if submitted.keep else (None, "")
        event: Event = Finished(job=submitted.job, result=encoded, run_id=run_id, warning=warning)
    except BaseException as error:  # a model may raise SystemExit, or its own exception
        event = Failed(job=submitted.job, failure=failure_of_job(error, timed_out=clock.over))
    if os.getpid() == pid:
        write_frame(events, event)


def be_first_to_go() -> None:
    """When memory runs out the system shall end this process, not the worker and not the app."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900")


def _keep(result: Record, encoded: bytes, store_path: str | None) -> tuple[str | None, str]:
    if store_path is None or not is_kept(result):
        return None, ""
    try:
        return Store(store_path).save(result, encoded=encoded), ""
    except NotSaved as error:
        return None, str(error)


class _Clock:
    """The wall clock of one job."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.began = time.monotonic()
        self.over = False

    def check(self) -> None:
        if time.monotonic() - self.began > self.limit_s:
            self.over = True
            raise Cancelled(
                f"The run took longer than its time limit of {self.limit_s:g} s.",
                hint="Take a smaller size or fewer repeats, or raise the time limit.",
            )
