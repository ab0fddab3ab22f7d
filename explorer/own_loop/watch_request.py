"""Arguments of `explorer.watch`, of the callbacks of trainers and of `explorer run`, with the checks that all share."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from explorer.errors import BadInput
from explorer.record.measurement import Measurement

HEAL = "heal"
"""The value of `on_oom` for a step that runs again."""


def no_answer(*_: object) -> None:
    """For a caller that wants no news. A named function, because a request is pickled into other processes."""


@dataclass(frozen=True, kw_only=True)
class WatchRequest:
    """Arguments of `watch`."""

    at: int | Collection[int] = ()
    worst_of: int = 0
    on_oom: str | os.PathLike[str] | None = None
    files: str = ""
    last: bool = False
    """Every step is recorded, and the last one that ended is kept."""
    steady: bool = False
    """Step 2 is recorded, whose optimizer has its state. Step 1 is kept if the training takes no other."""
    stop: bool = False
    """The training ends when the last requested step is recorded."""
    say: Callable[[str], object] = no_answer
    """Gets a sentence when a file is written."""
    recorded: Callable[[Measurement, Path], object] = no_answer
    """Gets each requested step as soon as its file is written. An error of it is a warning."""

    def steps(self) -> frozenset[int]:
        """The requested steps. Raises BadInput for the whole request, like `watch`."""
        at = tuple(self.at) if isinstance(self.at, Iterable) else (self.at,)
        if self.steady:
            at = (*at, 2)
        if not at and not self.worst_of and self.on_oom is None and not self.last:
            raise BadInput("Nothing to watch for.", hint="Give at=(2, 100), worst_of=20 or on_oom='oom.explorer'.")
        if not all(isinstance(step, Integral) and step >= 1 for step in at) or self.worst_of < 0:
            raise BadInput(
                f"Steps are counted from 1; asked for at={at}, worst_of={self.worst_of}.", hint="Step 1 is the first."
            )
        if self.on_oom not in (None, HEAL) and not (folder := Path(self.on_oom).parent).is_dir():
            raise BadInput(
                f"{self.on_oom} is to be written where memory is refused, and there is no folder {folder}.",
                hint="Make the folder first: when memory is refused it is too late.",
            )
        return frozenset(at)
