"""One forked process that answers in lines, heard until it is done, dead or out of time, and how it ended in words."""

from __future__ import annotations

import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from explorer.child_process.forks import at_hand, server_is_gone

_POLL_S = 0.25
_FROM_OUTSIDE = (None, *(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))
"""Ends that no model brings about; None: the fork server is gone."""


class Answering:
    """`function(*arguments, answers, *files)` in a process of its own, which begins at once; `answers` is a pipe here.

    Each line that it writes there is an answer. What it writes elsewhere is kept for `ending`.
    """

    def __init__(self, function: Callable[..., object], *arguments: object, files: Sequence[int] = ()) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`
        answers, voice = os.pipe()
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._process = at_hand().start(
            function, *arguments, files=[voice, *files], errors=self._stderr.fileno(), needs=["torch._dynamo"]
        )
        os.close(voice)
        self.timed_out = False
        """Whether `lines` gave up on it."""

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it if it still runs."""
        self._process.close()
        self._answers.close()
        self._stderr.close()

    @property
    def ended(self) -> bool:
        return self._process.ended

    @property
    def code(self) -> int | None:
        """Exit code once it has ended: negative is a signal; None: nobody can say."""
        return self._process.code

    @property
    def killed(self) -> bool:
        """Ended neither by what it ran nor by its time limit."""
        return not self.timed_out and self._process.code in _FROM_OUTSIDE

    def lines(self, deadline_s: float, alive: Callable[[], None]) -> Iterator[bytes]:
        """Until the clock of `time.monotonic` reads `deadline_s`. `alive` is called while waiting; it may raise."""
        answered = bytearray()
        while True:
            over = self._process.ended  # asked first: what it said before that is in the pipe
            late = time.monotonic() >= deadline_s
            ready, _, _ = select.select([self._answers], [], [], 0 if over or late else _POLL_S)
            if not ready:
                alive()
            chunk = self._answers.read(65_536) if ready else b""
            answered += chunk
            while (end := answered.find(b"\n")) >= 0:
                yield bytes(answered[:end])
                del answered[: end + 1]
            if not chunk and (over or late):
                self.timed_out = not over
                return
            if ready and not chunk:
                self._process.wait(_POLL_S)

    def ending(self) -> str:
        """How it ended before it had answered: `ended the process by SIGSEGV`."""
        code = self._process.code
        if self.timed_out:
            return "gave no answer in time"
        if code is None:
            return server_is_gone().sentence
        if code < 0:
            return f"ended the process by {signal.Signals(-code).name}"
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"ended the process with exit code {code}: {lines[-1] if lines else 'it said nothing'}"
