"""An exception becomes a Failure that crosses the pipe, and a Failure becomes the exception again."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterator

from explorer.errors import (
    BadInput,
    Cancelled,
    ExplorerError,
    ModelFailed,
    NotOnThisDevice,
    OutOfMemory,
)
from explorer.record.measurement import Failure, FailureKind

_LONGEST = 500
_LONGEST_TRACEBACK = 20_000
# torch's CPU allocator raises a bare RuntimeError; only its words tell.
_CPU_ALLOCATOR = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")

_KINDS: tuple[tuple[type[ExplorerError], FailureKind], ...] = (
    (ModelFailed, "model raised"),
    (BadInput, "bad input"),
    (NotOnThisDevice, "not on this device"),
    (OutOfMemory, "out of memory"),
    (Cancelled, "cancelled"),
)
_ERRORS: dict[FailureKind, type[ExplorerError]] = {
    "model raised": ModelFailed,
    "bad input": BadInput,
    "not on this device": NotOnThisDevice,
    "out of memory": OutOfMemory,
    "cancelled": Cancelled,
    "time-out": Cancelled,
}


def failure_of(error: BaseException, *, timed_out: bool = False) -> Failure:
    """What is shown for `error`. Memory that ran out is told from its words where its type does not say so."""
    said = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
    if (memory := _out_of_memory(error)) is not None:
        error = memory
    if isinstance(error, ExplorerError):
        kinds = [kind for type_, kind in _KINDS if isinstance(error, type_)]
        kind: FailureKind = kinds[0] if kinds else "internal"
        return Failure(
            kind="time-out" if timed_out and kind == "cancelled" else kind,
            sentence=error.sentence,
            hint=error.hint,
            traceback=said,
            asked_bytes=getattr(error, "asked_bytes", None),
            free_bytes=getattr(error, "free_bytes", None),
        )
    if isinstance(error, SystemExit):
        return Failure(
            kind="model raised",
            sentence=f"The model called sys.exit({'' if error.code is None else error.code!r}).",
            hint="A model that is loaded must not end the process: the traceback says where it does.",
            traceback=said,
        )
    if isinstance(error, KeyboardInterrupt):
        return Failure(kind="cancelled", sentence="The worker was interrupted.", traceback=said)
    return Failure(
        kind="internal",
        sentence=f"{type(error).__name__}: {error}"[:_LONGEST],
        hint="Nothing foresaw this error; the traceback says where it was raised.",
        traceback=said,
    )


def error_of(failure: Failure) -> ExplorerError:
    """The error that `failure` was, for callers that raise."""
    kind = _ERRORS.get(failure.kind, ExplorerError)
    if kind is OutOfMemory:
        return OutOfMemory(
            failure.sentence, hint=failure.hint, asked_bytes=failure.asked_bytes, free_bytes=failure.free_bytes
        )
    return kind(failure.sentence, hint=failure.hint)


def crash(return_code: int, doing: str, last_words: str) -> Failure:
    """A worker that ended by itself in the middle of `doing` (`measure sample_models/gpt.py`).

    `return_code` is negative for a signal; `last_words` is the end of what the worker wrote to stderr.
    """
    ended = f"was ended by {_signal_name(-return_code)}" if return_code < 0 else f"left with exit code {return_code}"
    hint = "The next run starts a new worker."
    if return_code == -signal.SIGKILL:
        hint = f"The system does this when memory runs out: try a smaller size or a memory limit. {hint}"
    return Failure(
        kind="crash", sentence=f"The worker process {ended} in the middle of: {doing}.", hint=hint, traceback=last_words
    )


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
