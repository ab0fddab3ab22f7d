"""The process of one job as the app holds it: reports, a polite end, the answer, and a crash in words.

events    ◀── Reported ..., then one of Finished / Failed ── the process (worker.py)
cancels   ── a byte: the next report ends the job ─────────▶
errors    ◀── stdout and stderr, of which the tail is kept ──

A process that ends without an answer has crashed; the answer is then a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from explorer.child_process.forks import Answering, signal_name
from explorer.errors import Crashed, UnreadableFile
from explorer.jobs.protocol import Event, Failed, Frames, Reported, Submit, description_of
from explorer.record.failure import Failure, FailureKind, failure_of

_GARBLED = "The model wrote into the pipe by which its process answers, which was not open for it."
_PREFIX = "checkpoint-explorer-"
_LEFTOVER = re.compile(rf"{_PREFIX}([0-9]{{1,9}})-\w+")

Start = Callable[[Submit, str, int], Answering]
"""Starts a job. Arguments: request, folder for temporary files, the end of a pipe by which the job is cancelled."""


class JobProcess:
    """The process of a job, which starts at once. Raises Crashed if the fork server is gone."""

    def __init__(self, submitted: Submit, start: Start, folder: str) -> None:
        self._request = submitted.request
        cancels, self._cancels = os.pipe()
        try:
            self._child = start(submitted, folder, cancels)
        except Crashed:
            os.close(self._cancels)
            raise
        finally:
            os.close(cancels)

    def cancel(self) -> None:
        """Asks the job, from any thread, to end at its next report."""
        with suppress(OSError):
            os.write(self._cancels, b"x")

    def kill(self) -> None:
        """Kills the process, from any thread; `answer` then returns a crash."""
        self._child.kill()

    def answer(self, tell: Callable[[Reported], None]) -> Event:
        """Passes the job's reports to `tell`; returns its answer, or a failure if there is none. Call it once."""
        frames = Frames()
        try:
            for chunk in self._child.chunks():
                frames.add(chunk)
                while (event := frames.next()) is not None:
                    if not isinstance(event, Reported):
                        return event
                    tell(event)
        except UnreadableFile as error:  # a model wrote into a file that is not its own
            return Failed(failure=failure_of(Crashed(_GARBLED, hint=str(error)), in_step=False))
        child = self._child
        what = description_of(self._request)
        return Failed(failure=crash(child.code, what, child.last_words, out_of_memory=child.out_of_memory))

    def close(self) -> None:
        """Ends the process, with all processes that it has started."""
        self._child.close()
        os.close(self._cancels)


def crash(return_code: int | None, doing: str, last_words: str, *, out_of_memory: bool | None = None) -> Failure:
    """A process that ended by itself, or was ended, in the middle of `doing` (`measure sample_models/gpt.py`).

    `return_code` is negative for a signal, None if unknown; `last_words` is the tail of stderr.
    `out_of_memory`: whether the system reports that it ended a process for lack of memory meanwhile; None: no report.
    """
    if return_code is None:
        ended = "ended together with the fork server, which was ended from outside,"
    elif return_code < 0:
        ended = f"was ended by {signal_name(-return_code)}"
    else:
        ended = f"left with exit code {return_code}"
    sentence, hint = f"The worker process {ended} in the middle of: {doing}.", "The next run starts a new process."
    if return_code == -signal.SIGKILL:
        hint = f"{_WHY_KILLED[out_of_memory]} {hint}"
    kind: FailureKind = "out of memory" if return_code == -signal.SIGKILL and out_of_memory else "crash"
    return Failure(kind=kind, sentence=sentence, hint=hint, traceback=last_words)


_WHY_KILLED = {
    True: "The system's memory ran out: try a smaller size, or a memory limit.",
    False: "It was ended from outside; the system's memory did not run out.",
    None: "It was ended from outside, by a person or by the system when memory runs out.",
}


def new_folder() -> str:
    """A folder for the temporary files of this process's jobs. Removes folders that killed processes left.

    Another user may own a folder with a similar name.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = _LEFTOVER.fullmatch(folder.name)
        with suppress(OSError):
            if pid and folder.lstat().st_uid == os.getuid() and not _lives(int(pid[1])):
                shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
