"""What a job or its process ended by, as a Failure that crosses the pipe."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterator

from msgspec.structs import replace

from explorer.errors import OutOfMemory
from explorer.record import failure as table
from explorer.record.failure import Failure, FailureKind

_LONGEST = 500
# torch's CPU allocator raises a bare RuntimeError; only its words tell.
_CPU_ALLOCATOR = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


def failure_of(error: BaseException, *, timed_out: bool = False) -> Failure:
    """What is shown for `error`. Memory that ran out is told from its words where its type does not say so."""
    text = "".join(traceback.format_exception(error))
    failure = table.failure_of(_out_of_memory(error) or error, in_step=False, text=text)
    return replace(failure, kind="time-out") if timed_out and failure.kind == "cancelled" else failure


def crash(return_code: int | None, doing: str, last_words: str, *, out_of_memory: bool | None = None) -> Failure:
    """A process that ended by itself, or was ended, in the middle of `doing` (`measure sample_models/gpt.py`).

    `return_code` is negative for a signal, None where nobody can say; `last_words` is the end of what it wrote to
    stderr. `out_of_memory`: whether the system says that it ended a process for lack of memory meanwhile; None: it
    does not say.
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


def _out_of_memory(error: BaseException) -> OutOfMemory | None:
    """Looks through the causes: a model's forward that fails for lack of memory is wrapped by whoever called it."""
    for link in _chain(error):
        if isinstance(link, OutOfMemory):
            return link
        asked = _CPU_ALLOCATOR.search(str(link))
        if asked or isinstance(link, MemoryError) or type(link).__name__ == "OutOfMemoryError":
            return OutOfMemory(
                f"The run asked for {int(asked[1]):,} bytes and was refused." if asked else _first_line(link),
                hint="Take a smaller size or batch, recompute more blocks, or raise the memory limit.",
                asked_bytes=int(asked[1]) if asked else None,
            )
    return None


def _first_line(error: BaseException) -> str:
    return f"Memory ran out: {str(error).splitlines()[0] if str(error) else type(error).__name__}"[:_LONGEST]


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
