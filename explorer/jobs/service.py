"""The worker's side of the pipe: one job at a time, cancel at any moment, and no orphan when the app is gone.

    reader thread   stdin ── Submit ──▶ waiting jobs          CancelJob ──▶ the job's report raises Cancelled
                             end of stdin ──▶ the process and all its children end at once
    main thread     waiting jobs ──▶ answer ──▶ store ──▶ Finished       (or Failed)

What a model prints to stdout goes to stderr, and a model that reads stdin finds it empty: the pipe is private.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import IO, NoReturn

from explorer.errors import Cancelled, ExplorerError, NotSaved
from explorer.jobs.failures import failure_of
from explorer.jobs.protocol import (
    CancelJob,
    Command,
    Event,
    Failed,
    Finished,
    Reported,
    Request,
    Submit,
    read_frame,
    time_limit_s,
    write_frame,
)
from explorer.jobs.store import Store, is_kept
from explorer.record.base import Record, to_msgpack
from explorer.record.measurement import Failure
from explorer.record.progress import Progress, Report

Answer = Callable[[Request, Report], Record]
"""Does the work of a request: describe, measure, compare, ..."""


def private_channel() -> tuple[IO[bytes], IO[bytes]]:
    """(commands, events): the pipe to the app, out of reach of the models; stdout is stderr from now on."""
    commands, events = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, events


class Service:
    """Serves `answer` until the pipe ends. `idle` steps run one by one while nobody waits (imports that warm up).

    Where `is_fit` says no after a job, the process ends once the answer is out: the next job gets a new one.
    """

    def __init__(
        self,
        answer: Answer,
        store: Store | None,
        *,
        idle: Iterable[Callable[[], object]] = (),
        is_fit: Callable[[], bool] = lambda: True,
    ) -> None:
        self._answer = answer
        self._is_fit = is_fit
        self._store = store
        self._idle = list(idle)
        self._commands, self._events = private_channel()
        self._changed = threading.Condition()
        self._waiting: list[Submit] = []
        self._cancelled: set[str] = set()
        self._sending = threading.Lock()

    def run(self) -> NoReturn:
        """Never returns; a job that raises anything at all is answered with Failed."""
        threading.Thread(target=self._follow, name="commands", daemon=True).start()
        while True:
            try:
                if (submitted := self._next()) is not None:
                    self._work(submitted)
            except KeyboardInterrupt:
                continue  # between two jobs there is nothing to interrupt

    def _follow(self) -> None:
        try:
            while (command := read_frame(self._commands, Command)) is not None:
                with self._changed:
                    if isinstance(command, Submit):
                        self._waiting.append(command)
                    else:
                        self._cancel(command)
                    self._changed.notify()
        except (ExplorerError, OSError) as error:
            print(f"worker: {error}", file=sys.stderr)
        _end_with_children()

    def _cancel(self, command: CancelJob) -> None:
        """A job that waits is answered here; the one that works stops at its next report."""
        for submitted in self._waiting:
            if submitted.job == command.job:
                self._waiting.remove(submitted)
                self._send(Failed(job=command.job, failure=_never_began()))
                return
        self._cancelled.add(command.job)

    def _next(self) -> Submit | None:
        """The next job; None after an idle step instead."""
        with self._changed:
            if not self._idle:
                self._changed.wait_for(lambda: self._waiting)
            if self._waiting:
                return self._waiting.pop(0)
            step = self._idle.pop(0)
        with contextlib.suppress(ImportError):
            step()
        return None

    def _work(self, submitted: Submit) -> None:
        clock = _Clock(time_limit_s(submitted.request))

        def report(progress: Progress) -> None:
            clock.check()
            if submitted.job in self._cancelled:
                raise Cancelled("The run was cancelled.")
            self._send(Reported(job=submitted.job, progress=progress))

        try:
            report(Progress(what="starting", done=0, total=0))
            result = self._answer(submitted.request, report)
            run_id, warning = self._keep(result) if submitted.keep else (None, "")
            event: Event = Finished(job=submitted.job, result=to_msgpack(result), run_id=run_id, warning=warning)
        except BaseException as error:  # a model may raise SystemExit, and an interrupt ends the job, not the worker
            event = Failed(job=submitted.job, failure=failure_of(error, timed_out=clock.over))
        self._cancelled.discard(submitted.job)
        self._send(event)
        if not self._is_fit():
            _end_with_children()

    def _keep(self, result: Record) -> tuple[str | None, str]:
        if self._store is None or not is_kept(result):
            return None, ""
        try:
            return self._store.save(result), ""
        except NotSaved as error:
            return None, str(error)

    def _send(self, event: Event) -> None:
        with self._sending, contextlib.suppress(BrokenPipeError):  # the reader thread ends the process
            write_frame(self._events, event)


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


def _never_began() -> Failure:
    return Failure(kind="cancelled", sentence="The run was cancelled before it began.")


def _end_with_children() -> NoReturn:
    """The app is gone: leave no orphan, not even those a model started."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
