"""Why a run has no result, as a record: which kind of failure an exception is, and in which words."""

from __future__ import annotations

import traceback
from typing import Literal

from explorer.errors import BadInput, Cancelled, Crashed, ExplorerError, ModelFailed, NotOnThisDevice, OutOfMemory
from explorer.record.base import Record

FailureKind = Literal[
    "bad input", "model raised", "out of memory", "crash", "time-out", "cancelled", "not on this device", "internal"
]


class Failure(Record):
    """Why a run has no result: shown as a result, in the words of explorer/errors.py."""

    kind: FailureKind
    sentence: str
    hint: str = ""
    traceback: str = ""
    asked_bytes: int | None = None
    free_bytes: int | None = None


_LONGEST = 500
_LONGEST_TRACEBACK = 20_000

_KINDS: tuple[tuple[type[ExplorerError], FailureKind], ...] = (
    (ModelFailed, "model raised"),
    (BadInput, "bad input"),
    (NotOnThisDevice, "not on this device"),
    (OutOfMemory, "out of memory"),
    (Cancelled, "cancelled"),
    (Crashed, "crash"),
)


def failure_of(error: BaseException, *, in_step: bool, text: str | None = None) -> Failure:
    """`in_step`: only the model, its loss and torch were at work, so what nobody foresaw is the model's.

    `text` is the traceback where it is another error's.
    """
    text = (text or "".join(traceback.format_exception(error)))[-_LONGEST_TRACEBACK:]
    if isinstance(error, ExplorerError):
        return Failure(
            kind=next((kind for type_, kind in _KINDS if isinstance(error, type_)), "internal"),
            sentence=error.sentence,
            hint=error.hint,
            traceback=text,
            asked_bytes=getattr(error, "asked_bytes", None),
            free_bytes=getattr(error, "free_bytes", None),
        )
    if isinstance(error, KeyboardInterrupt):
        return Failure(kind="cancelled", sentence="The worker was interrupted.", traceback=text)
    if isinstance(error, SystemExit):
        return Failure(
            kind="model raised",
            sentence=f"The model called sys.exit({'' if error.code is None else error.code!r}).",
            hint="A model that is loaded must not end the process: the traceback says where it does.",
            traceback=text,
        )
    if not isinstance(error, Exception):
        return Failure(
            kind="model raised",
            sentence=f"The model raised {_in_words(error)}",
            hint="It is no Exception but a BaseException, which `except Exception` lets pass: raise an Exception. "
            "The traceback says where.",
            traceback=text,
        )
    if in_step:
        hint = "The traceback shows the line of the model."
        return Failure(kind="model raised", sentence=f"The model raised {_in_words(error)}", hint=hint, traceback=text)
    hint = "Nothing foresaw this error; the traceback says where it was raised."
    return Failure(kind="internal", sentence=f"{type(error).__name__}: {error}"[:_LONGEST], hint=hint, traceback=text)


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"[:_LONGEST]
