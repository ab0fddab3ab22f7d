"""One tree of errors, each a sentence for the person who reads it.

ExplorerError            what was asked, what was found; `hint` says what to do next
├── BadInput             the caller can mend it: a model, a batch, a policy, a plan, a run file
│   ├── ModelNotLoaded   the reference does not import, or its factory raised
│   ├── ModelFailed      the model's own forward, loss or backward raised
│   ├── InvalidPolicy    a policy that names what is not there, or contradicts itself
│   ├── InvalidPlan      a pipeline plan that cannot run on this model
│   └── UnreadableFile   a policy or run file that is corrupt, foreign or too new
├── NotOnThisDevice      the device or the torch version lacks what was asked
├── OutOfMemory          the device or the process had no more
├── Cancelled            a person or a time limit ended the run
├── Crashed              a process that had work to do is gone
└── NotSaved             the store or a file could not be written
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ExplorerError(Exception):
    """A sentence that says what was asked and what was found, and a hint that says what to do next."""

    def __init__(self, sentence: str, *, hint: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.sentence} {self.hint}".strip()

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.sentence, self.hint), vars(self))  # bytes asked and free go along


class BadInput(ExplorerError):
    """The caller can mend it."""


class ModelNotLoaded(BadInput):
    """The model reference does not import, names nothing, or its factory raised."""


class ModelFailed(BadInput):
    """The model's own forward, loss or backward raised."""


class InvalidPolicy(BadInput):
    """A policy names blocks that are not there, or its options contradict each other."""


class InvalidPlan(BadInput):
    """A pipeline plan that cannot run on this model."""


class UnreadableFile(BadInput):
    """A policy or run file that is corrupt, foreign or too new."""


class NotOnThisDevice(ExplorerError):
    """The device or the torch version lacks what was asked."""


class OutOfMemory(ExplorerError):
    """The device or the process had no more memory; bytes are None where nobody said."""

    def __init__(
        self, sentence: str, *, hint: str = "", asked_bytes: int | None = None, free_bytes: int | None = None
    ) -> None:
        super().__init__(sentence, hint=hint)
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes


class Cancelled(ExplorerError):
    """A person or a time limit ended the run."""


class Crashed(ExplorerError):
    """A process that had work to do ended by itself or was ended from outside."""


class NotSaved(ExplorerError):
    """The store or a file could not be written."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean ...?` for a name that is not among `known`, or an empty string."""
    close = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(close)}?" if close else ""


def _rebuild(kind: type[ExplorerError], sentence: str, hint: str) -> ExplorerError:
    return kind(sentence, hint=hint)
