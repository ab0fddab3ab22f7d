"""The error that ended a job or its process, as a Failure that crosses the pipe."""

from __future__ import annotations

import signal

from msgspec.structs import replace

from explorer.record.failure import Failure, FailureKind, failure_of


def failure_of_job(error: BaseException, *, timed_out: bool = False) -> Failure:
    """The failure to show for `error`. `timed_out`: the job's clock cancelled the job, not a person."""
    failure = failure_of(error, in_step=False)
    return replace(failure, kind="time-out") if timed_out and failure.kind == "cancelled" else failure


def crash(return_code: int | None, doing: str, last_words: str, *, out_of_memory: bool | None = None) -> Failure:
    """A process that ended by itself, or was ended, in the middle of `doing` (`measure sample_models/gpt.py`).

    `return_code` is negative for a signal, None if unknown; `last_words` is the tail of stderr.
    `out_of_memory`: whether the system reports that it ended a process for lack of memory meanwhile; None: no report.
    """
    if return_code is None:
        ended = "ended together with the fork server, which was ended from outside,"
    elif return_code < 0:
        ended = f"was ended by {_signal_name(-return_code)}"
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
