"""One tree of errors, each a sentence for the person who reads it, and one way to repeat what others raised.

ExplorerError            what was asked, what was found; `hint` says what to do next
├── BadInput             the caller can mend it: a model, a batch, a policy, a plan, a run file
│   ├── ModelNotLoaded   the reference does not import, or its factory raised
│   ├── ModelFailed      the model's own forward, loss or backward raised
│   ├── InvalidPolicy    a policy that names what is not there, or contradicts itself
│   ├── InvalidPlan      a pipeline plan that cannot run on this model
│   └── UnreadableFile   a policy or run file that is corrupt, foreign or too new
├── NotOnThisDevice      the device or the torch version lacks what was asked
├── OutOfMemory          the device or the process had no more
├── Cancelled            a person ended the run
│   └── TimedOut         its time limit ended the run
├── Crashed              a process that had work to do is gone
└── NotSaved             the store or a file could not be written
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from heapq import nsmallest
from pathlib import Path

LONGEST_MESSAGE = 300
"""Most characters that are repeated of a message raised by other code."""
_SHORT = 160
"""As long as they stay within this many, sentences that follow the first are repeated too: "Given input size: (4x4).
Output size is too small" says nothing in its first."""
_LONGEST_SENTENCE = 4000
_LONGEST_WORD = 240
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")
_LONGEST_READ = 20_000
"""Characters of a stranger's message that are looked at."""
_MOST_COMPARED = 500
_BORDER = re.compile(r"""(?<!e\.g)(?<!i\.e)(?<!vs)(?<!cf)(?<!No)(?<=[^.\s])[.!?][)"'`\]]?(?=\s+["'`(\[A-Z0-9])""")


class ExplorerError(Exception):
    """A sentence that says what was asked and what was found, and a hint that says what to do next."""

    def __init__(self, sentence: str, *, hint: str = "") -> None:
        self.sentence, self.hint = bounded(sentence), bounded(hint)
        super().__init__(self.sentence)

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
    """A policy names blocks that are not there, or its options contradict each other.

    `neighbours`: two blocks that the model does not let be one segment.
    """

    def __init__(self, sentence: str, *, hint: str = "", neighbours: tuple[str, ...] = ()) -> None:
        super().__init__(sentence, hint=hint)
        self.neighbours = neighbours


class InvalidPlan(BadInput):
    """A pipeline plan that cannot run on this model."""


class UnreadableFile(BadInput):
    """A policy or run file that is corrupt, foreign or too new."""


class NotOnThisDevice(ExplorerError):
    """The device or the torch version lacks what was asked."""


class OutOfMemory(ExplorerError):
    """The device or the process had no more memory; bytes are None if the error did not name them."""

    def __init__(
        self, sentence: str, *, hint: str = "", asked_bytes: int | None = None, free_bytes: int | None = None
    ) -> None:
        super().__init__(sentence, hint=hint)
        self.asked_bytes = asked_bytes
        self.free_bytes = free_bytes


class Cancelled(ExplorerError):
    """A person ended the run."""


class TimedOut(Cancelled):
    """The time limit of the run ended it."""


class Crashed(ExplorerError):
    """A process that had work to do ended by itself or was ended from outside."""


class NotSaved(ExplorerError):
    """The store or a file could not be written."""


def bounded(text: str) -> str:
    """A sentence that a page, a terminal and a file can take, whatever a stranger's name puts into it.

    Control characters and halves of letters are escaped; a word longer than _LONGEST_WORD loses its middle.
    """
    text = text[:_LONGEST_READ]
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    text = _LONG_WORD.sub(lambda word: f"{word[0][: _LONGEST_WORD // 2]}…{word[0][-20:]}", text)
    return text if len(text) <= _LONGEST_SENTENCE else f"{text[: _LONGEST_SENTENCE - 1]}…"


def said_by(error: BaseException) -> str:
    """`ValueError: what it says`, as `message_of` repeats it."""
    return f"{_in_one_line(type(error).__name__)[:_SHORT]}: {message_of(error)}"


def message_of(error: BaseException) -> str:
    """What an error says, to stand inside a sentence: one line without a full stop, its first sentence whole.

    Of a stranger's at most LONGEST_MESSAGE characters, the last a `…` where more was said; sentences after the first
    only where all is short, and none of what stands on lines below. Our own errors are repeated as they are.
    """
    if isinstance(error, ExplorerError):
        return str(error).removesuffix(".")
    words = _first_paragraph(words_of(error)).rstrip(".") or "no message"
    borders = [border.end() for border in _BORDER.finditer(words)] or [len(words)]
    words = words if len(words) <= _SHORT else words[: max([borders[0], *(end for end in borders if end <= _SHORT)])]
    if len(words) > LONGEST_MESSAGE:
        return words[: LONGEST_MESSAGE - 1].rstrip() + "…"
    return words.rstrip(".")


def words_of(error: BaseException) -> str:
    """The beginning of what an error says; nothing where it raises itself when it is asked."""
    try:
        return str(error)[:_LONGEST_READ]
    except Exception:
        return ""


def nearest(name: str, known: Iterable[str]) -> str:
    """`Did you mean ...?` for a name that is not among `known`, or an empty string.

    Of many names those are compared that share most parts of a dotted path, then those of about its length.
    """
    parts = set(name.split("."))
    likely = nsmallest(
        _MOST_COMPARED, known, key=lambda one: (-len(parts.intersection(one.split("."))), abs(len(one) - len(name)))
    )
    close = get_close_matches(name[:_SHORT], [one for one in likely if len(one) <= _SHORT], n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(close)}?" if close else ""


def brings(module: str) -> str:
    """What installs a module that could not be imported: the package itself, unless the module is a framework."""
    if module in ("lightning", "transformers", "pytest"):
        return f"pip install {module}"
    extra = "[app]" if module in ("streamlit", "starlette", "torchviz", "graphviz") else ""
    return f"pip install '.{extra}' in a clone of Checkpoint Explorer, or pip install 'FILE.whl{extra}' of its wheel"


def namesake(folder: Path) -> str:
    """A sentence if `folder` has a module `explorer` that is not this library; else empty."""
    here = Path(__file__).resolve().parent
    for path in (folder / "explorer.py", folder / "explorer" / "__init__.py"):
        if path.is_file() and path.resolve().parent != here:
            return (
                f"{path} has the name of the library that runs your code: `import explorer` finds the library. "
                "Rename your file if your code imports it."
            )
    return ""


def _first_paragraph(text: str) -> str:
    """In one line: the first that is not empty, with the next where it ends in a colon."""
    words = ""
    for line in filter(None, map(_in_one_line, text.splitlines())):
        words = f"{words} {line}".strip()
        if not words.endswith(":"):
            break
    return words


def _in_one_line(text: str) -> str:
    """Nothing that breaks a line, colours a terminal or is half of a letter; no two spaces."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _rebuild(kind: type[ExplorerError], sentence: str, hint: str) -> ExplorerError:
    return kind(sentence, hint=hint)


NEEDS_CUDA = ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver on your system")
"""What torch says where a script asks for a GPU: a CPU build, and a CUDA build without a driver."""
_CUDA_LIBRARY = re.compile(r"lib(cu\w+|nv\w+|nccl)\.so")


def asks_for_cuda(error: Exception) -> bool:
    """Whether a script failed because there is no GPU. torch's CUDA build is not even imported without a driver."""
    is_missing = isinstance(error, (ImportError, OSError)) and _CUDA_LIBRARY.search(str(error)) is not None
    return is_missing or any(text in str(error) for text in NEEDS_CUDA)
