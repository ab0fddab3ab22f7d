"""The worker's side of the pipe: one job at a time, each in a separate process. No process outlives the app.

reader thread   stdin ── Submit ──▶ waiting jobs     CancelJob, EndJob ──▶ the job's process
                         end of stdin ──▶ everything ends at once
main thread     waiting jobs ──▶ process ──▶ its reports ──▶ its answer: Finished or Failed
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn

from explorer.errors import Crashed, ExplorerError
from explorer.jobs.failures import failure_of_job
from explorer.jobs.job_process import JobProcess, OomKills, Start
from explorer.jobs.protocol import (
    CancelJob,
    Command,
    EndJob,
    Event,
    Failed,
    Reported,
    Submit,
    read_frame,
    write_frame,
)
from explorer.record.failure import Failure
from explorer.record.plan import Progress

_PREFIX = "checkpoint-explorer-"
_LEFTOVER = re.compile(rf"{_PREFIX}([0-9]{{1,9}})-\w+")


def private_channel() -> tuple[IO[bytes], IO[bytes]]:
    """(commands, events): the pipe to the app, out of reach of started processes. stdout becomes stderr."""
    commands, events = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, events


class Service:
    """Runs each job in a process that `start` starts, until the pipe ends; then `end` ends the remaining processes."""

    def __init__(self, start: Start, end: Callable[[], None], n_oom_kills: OomKills = lambda: None) -> None:
        self._start, self._end_all, self._n_oom_kills = start, end, n_oom_kills
        self._commands, self._events = private_channel()
        self._changed = threading.Condition()
        self._waiting: list[Submit] = []
        self._working: tuple[str, JobProcess] | None = None
        self._sending = threading.Lock()
        _remove_leftovers()
        self._folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")

    def run(self) -> NoReturn:
        """Never returns; whatever becomes of a job's process, the job is answered."""
        threading.Thread(target=self._follow, name="commands", daemon=True).start()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                submitted = self._waiting.pop(0)
                begun = self._begin(submitted)
            if begun is not None:
                self._finish(begun)

    def _follow(self) -> None:
        try:
            while (command := read_frame(self._commands, Command)) is not None:
                with self._changed:
                    if isinstance(command, Submit):
                        self._waiting.append(command)
                    else:
                        self._stop(command)
                    self._changed.notify()
        except (ExplorerError, OSError) as error:
            print(f"worker: {error}", file=sys.stderr)
        self._end()

    def _stop(self, command: CancelJob | EndJob) -> None:
        """A job that waits is answered here."""
        for submitted in self._waiting:
            if submitted.job == command.job:
                self._waiting.remove(submitted)
                self._send(Failed(job=command.job, failure=_never_began()))
                return
        if self._working is not None and self._working[0] == command.job:
            process = self._working[1]
            process.cancel() if isinstance(command, CancelJob) else process.kill()

    def _begin(self, submitted: Submit) -> JobProcess | None:
        """None: it could not be started, and the job is answered."""
        self._send(Reported(job=submitted.job, progress=Progress(what="starting", done=0, total=0)))
        folder = tempfile.mkdtemp(dir=self._folder)
        try:
            process = JobProcess(submitted, self._start, folder, self._n_oom_kills)
        except Crashed as error:
            self._send(Failed(job=submitted.job, failure=failure_of_job(error)))
            return None
        self._working = submitted.job, process
        return process

    def _finish(self, process: JobProcess) -> None:
        answer = process.answer(self._send)
        with self._changed:
            self._working = None
        self._send(answer)
        process.close()
        for folder in Path(self._folder).iterdir():
            shutil.rmtree(folder, ignore_errors=True)

    def _send(self, event: Event) -> None:
        with self._sending, contextlib.suppress(BrokenPipeError):  # the reader thread ends the process
            write_frame(self._events, event)

    def _end(self) -> NoReturn:
        """Ends all processes, also processes that a model started: the app is gone."""
        self._sending.acquire()  # no answer is awaited any more
        self._end_all()
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


def _remove_leftovers() -> None:
    """Removes folders of this user's killed workers. Another user may own a folder with a similar name."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = _LEFTOVER.fullmatch(folder.name)
        with contextlib.suppress(OSError):
            if pid and folder.lstat().st_uid == os.getuid() and not _lives(int(pid[1])):
                shutil.rmtree(folder, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _never_began() -> Failure:
    return Failure(kind="cancelled", sentence="The run was cancelled before it began.")
