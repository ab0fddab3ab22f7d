"""The worker's side of the pipe: one job at a time, each in a separate process. No process outlives the app.

reader thread   stdin ── Submit ──▶ waiting jobs     CancelJob, EndJob ──▶ the job's process
                         end of stdin ──▶ everything ends at once
main thread     waiting jobs ──▶ process ──▶ its reports ──▶ its answer: Finished or Failed

A process that ends without an answer has crashed; the worker then answers with a failure.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn, Protocol

from explorer.errors import Crashed, ExplorerError, UnreadableFile
from explorer.jobs.failures import crash, failure_of_job
from explorer.jobs.protocol import (
    CancelJob,
    Command,
    EndJob,
    Event,
    Failed,
    Frames,
    Reported,
    Submit,
    description_of,
    read_frame,
    write_frame,
)
from explorer.record.failure import Failure
from explorer.record.plan import Progress

_CHUNK_BYTES = 1 << 20
_LAST_WORDS_BYTES = 16_000
_GARBLED = "The model wrote into the pipe by which its process answers, which was not open for it."
_PREFIX = "checkpoint-explorer-"
_LEFTOVER = re.compile(rf"{_PREFIX}([0-9]{{1,9}})-\w+")


class Process(Protocol):
    """A process that a fork server has started."""

    code: int | None
    """Exit code after the end: negative is a signal; None: unknown."""

    def fileno(self) -> int: ...

    @property
    def ended(self) -> bool: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


Start = Callable[[Submit, str, tuple[int, int], int], Process]
"""Starts a job. Arguments: request, folder for temporary files, pipes of events and cancels, stdout and stderr."""
OomKills = Callable[[], int | None]
"""Number of processes that the system has ended for lack of memory so far; None if the system does not report."""


class JobProcess:
    """Starts at once. Raises Crashed if the fork server is gone."""

    def __init__(self, submitted: Submit, start: Start, folder: str, n_oom_kills: OomKills) -> None:
        self._submitted, self._n_oom_kills = submitted, n_oom_kills
        self._n_before = n_oom_kills()
        self._frames: Frames[Event] = Frames(Event)
        self._last_words = bytearray()
        self._events, events = os.pipe()
        self._errors, errors = os.pipe()
        cancels, self._cancels = os.pipe()
        try:
            self._process = start(submitted, folder, (events, cancels), errors)
        finally:
            for file in (events, errors, cancels):
                os.close(file)

    def cancel(self) -> None:
        """A polite word, from any thread: its next report ends it."""
        with suppress(OSError):
            os.write(self._cancels, b"x")

    def kill(self) -> None:
        """Kills the process, from any thread; `answer` then returns a crash."""
        self._process.kill()

    def answer(self, tell: Callable[[Reported], None]) -> Event:
        """Passes its reports to `tell`; returns its answer, or the failure that speaks for it. Call it once."""
        listened = [self._events, self._errors]
        try:
            while True:
                ready, _, _ = select.select([*listened, self._process.fileno()], [], [])
                over = self._process.ended
                if over:  # earlier reports are still in the pipes
                    ready, _, _ = select.select(listened, [], [], 0)
                for file in listened.copy():
                    if file in ready and not self._listen(file):
                        listened.remove(file)
                while (event := self._frames.next()) is not None:
                    if not isinstance(event, Reported):
                        return event
                    tell(event)
                if over and not ready:
                    return self._crashed()
        except UnreadableFile as error:  # a model wrote into a file that is not its own
            return Failed(job=self._submitted.job, failure=failure_of_job(Crashed(_GARBLED, hint=str(error))))

    def close(self) -> None:
        """Ends the process, with all processes that it has started."""
        self._process.close()
        for file in (self._events, self._errors, self._cancels):
            os.close(file)

    def _listen(self, file: int) -> bool:
        """False at the end of the pipe."""
        written = os.read(file, _CHUNK_BYTES)
        if file == self._events:
            self._frames.add(written)
        else:
            self._last_words += written
            del self._last_words[:-_LAST_WORDS_BYTES]
        return bool(written)

    def _crashed(self) -> Event:
        words = self._last_words.decode(errors="replace").strip()
        before, now = self._n_before, self._n_oom_kills()
        out_of_memory = None if before is None or now is None else now > before
        failure = crash(self._process.code, description_of(self._submitted.request), words, out_of_memory=out_of_memory)
        return Failed(job=self._submitted.job, failure=failure)


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
        with self._sending, suppress(BrokenPipeError):  # the reader thread ends the process
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
        with suppress(OSError):
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
