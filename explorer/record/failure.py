"""The failure of a run as a record: its kind and its sentence, derived from an exception.

                          raised in a step     anywhere else in a job
memory ran out            out of memory        out of memory             found among its causes too
an error of ours          its own kind         its own kind              see the table below
KeyboardInterrupt         cancelled            cancelled                 in a worker's process: model raised
SystemExit, odd ones      model raised         model raised
any other Exception       model raised         internal, or model raised where the model's own code raised it

The kind depends on the place where an error is raised, never on how far the error travels. Code that runs a user's
model outside of a measured step converts errors to ModelFailed at once (engine/model/loaded.py: blaming). Errors of
other calls (`train`, `__eq__`, a property) are recognised by their place in the traceback.
"""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Literal

import msgspec

from explorer.errors import (
    BadInput,
    Cancelled,
    Crashed,
    ExplorerError,
    ModelFailed,
    NotOnThisDevice,
    OutOfMemory,
    TimedOut,
    bounded,
    said_by,
    words_of,
)
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
    neighbours: tuple[str, ...] = ()
    """Two blocks that the model refuses as one segment."""

    def __post_init__(self) -> None:
        for name in ("sentence", "hint"):
            msgspec.structs.force_setattr(self, name, bounded(getattr(self, name)))
        text = self.traceback[-_LONGEST_TRACEBACK:].encode(errors="backslashreplace").decode()
        msgspec.structs.force_setattr(self, "traceback", text[-_LONGEST_TRACEBACK:])


_LONGEST_TRACEBACK = 20_000

_KINDS: tuple[tuple[type[ExplorerError], FailureKind], ...] = (
    (ModelFailed, "model raised"),
    (BadInput, "bad input"),
    (NotOnThisDevice, "not on this device"),
    (OutOfMemory, "out of memory"),
    (TimedOut, "time-out"),
    (Cancelled, "cancelled"),
    (Crashed, "crash"),
)

CPU_REFUSAL = re.compile(r"memory: you tried to allocate (\d+) bytes")
"""Message of torch's CPU allocator, which raises a plain RuntimeError that only its text distinguishes."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, in `error` or in an error that caused it."""
    return refusal_behind(error) is not None


def refusal_behind(error: BaseException) -> BaseException | None:
    """The out-of-memory error among `error` and its causes; None if there is none.

    torch raises OutOfMemoryError on CUDA and a plain RuntimeError on the CPU; Python and C++ raise MemoryError.
    """
    return next((link for link in _chain(error) if _refuses(link)), None)


def failure_of(error: BaseException, *, in_step: bool) -> Failure:
    """The failure of `error`. `in_step`: only the model, its loss and torch ran, so other errors are the model's."""
    text = "".join(traceback.format_exception(error))
    error = _as_out_of_memory(error)
    if isinstance(error, ExplorerError):
        return Failure(
            kind=next((kind for type_, kind in _KINDS if isinstance(error, type_)), "internal"),
            sentence=error.sentence,
            hint=error.hint,
            traceback=text,
            asked_bytes=getattr(error, "asked_bytes", None),
            free_bytes=getattr(error, "free_bytes", None),
            neighbours=getattr(error, "neighbours", ()),
        )
    kind, sentence, hint = _foreign(error, in_step=in_step)
    return Failure(kind=kind, sentence=sentence, hint=hint, traceback=text)


def _foreign(error: BaseException, *, in_step: bool) -> tuple[FailureKind, str, str]:
    """Kind, sentence and hint of an error that is not one of ours."""
    raised = f"The model raised {said_by(error)}."
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return "cancelled", "The worker was interrupted.", ""
    if isinstance(error, SystemExit):
        sentence = f"The model called sys.exit({'' if error.code is None else error.code!r})."
        hint = "A model that is loaded must not end the process: the traceback says where it does."
        return "model raised", sentence, hint
    if not isinstance(error, Exception):
        hint = "It is no Exception but a BaseException, which `except Exception` lets pass: raise an Exception. "
        return "model raised", raised, f"{hint}The traceback says where."
    if in_step or _raised_by_model(error):
        frames = traceback.extract_tb(error.__traceback__)
        inside = frames and "-packages" in frames[-1].filename
        line = "the library that raised it" if inside else "the model"
        return "model raised", raised, f"The traceback shows the line of {line}."
    hint = "The explorer has no rule for this error; the traceback says where it was raised."
    return "internal", f"{said_by(error)}.", hint


def _raised_by_model(error: BaseException) -> bool:
    """True if the innermost line outside of libraries belongs neither to this program nor to torch."""
    packages = [
        frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    owners = [name for name in packages if name not in sys.stdlib_module_names and name not in _LIBRARIES]
    return bool(owners) and owners[-1] != "explorer"


_LIBRARIES = ("torch", "torchviz", "numpy", "highspy", "msgspec", "yaml", "platformdirs")


def _as_out_of_memory(error: BaseException) -> BaseException:
    """`error`, or an OutOfMemory with a clear sentence if memory ran out."""
    refusal = refusal_behind(error)
    if refusal is None or isinstance(refusal, OutOfMemory):
        return refusal or error
    match = CPU_REFUSAL.search(words_of(refusal))
    return OutOfMemory(
        f"The run asked for {int(match[1]):,} bytes and was refused."
        if match
        else f"Memory ran out: {said_by(refusal)}.",
        hint="Take a smaller size or batch, recompute more blocks, or raise the memory limit.",
        asked_bytes=int(match[1]) if match else None,
    )


def _refuses(error: BaseException) -> bool:
    """True if the error is out of memory, judged by class names and text, because this ring cannot import torch."""
    if isinstance(error, (MemoryError, OutOfMemory)):
        return True
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    words = words_of(error)
    if CPU_REFUSAL.search(words):
        return True
    refused = any(
        sign in words for sign in ("std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    )
    refused = refused or ("DefaultCPUAllocator" in words and "memory" in words)
    return isinstance(error, RuntimeError) and refused


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and its causes, in order."""
    ids: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in ids:
        ids.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
