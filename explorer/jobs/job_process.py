"""The process of one job, as the worker sees it: its reports, its output and the way it ended.

A process that ends without an answer has crashed; the worker then answers with a failure.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from explorer.errors import Crashed, UnreadableFile
from explorer.jobs.failures import crash, failure_of_job
from explorer.jobs.protocol import Event, Failed, Frames, Reported, Submit, model_of_request

_CHUNK_BYTES = 1 << 20
_LAST_WORDS_BYTES = 16_000


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
        request = self._submitted.request
        doing = f"{type(request).__name__.lower()} {model_of_request(request)}".strip()
        words = self._last_words.decode(errors="replace").strip()
        before, now = self._n_before, self._n_oom_kills()
        out_of_memory = None if before is None or now is None else now > before
        failure = crash(self._process.code, doing, words, out_of_memory=out_of_memory)
        return Failed(job=self._submitted.job, failure=failure)


_GARBLED = "The model wrote into the pipe by which its process answers, which was not open for it."
