"""Which siblings could be one segment: each is given what the one before it returned, and nobody else reads that.

x = blocks[0](x, mask)                      blocks.1 follows blocks.0: what goes in is the very object that came out,
x = blocks[1](x, mask)                      everything else is what blocks.0 was given
x = blocks[2](x, mask); kept.append(x)      blocks.3 follows nobody: the model reads what blocks.2 returned later on
if random() > 0.1: x = blocks[3](x, mask)   nor does a block before which the model draws or decides by a value
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from explorer.engine.policy.in_turn import Arguments, arguments_of, handed_on, same_arguments


@dataclass
class _Ended:
    """The last call of a block that ended below one parent."""

    fqn: str
    given: Arguments
    output: Any
    python_rng: Any
    broken: bool = False
    """Whether the model drew from torch or decided something since."""


class Turns:
    """Told of calls and operators as they happen."""

    def __init__(self) -> None:
        self._last: dict[str, _Ended] = {}
        self._given: list[Arguments] = []
        self._before: dict[str, list[str]] = defaultdict(list)
        """For each call of a block the sibling whose call it follows, or the empty string."""
        self._owner: dict[Hashable, str] = {}
        self._readers: dict[str, set[str]] = defaultdict(set)
        """The siblings that read what a block returned, and the empty string for all other readers."""

    def begins(self, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = arguments_of(args, kwargs)
        last = self._last.get(_parent(fqn))
        at_once = last is not None and not last.broken and last.python_rng == random.getstate()
        follows = last is not None and at_once and same_arguments(handed_on(last.output, last.given), given)
        self._before[fqn].append(last.fqn if last is not None and follows else "")
        self._given.append(given)

    def ends(self, fqn: str, stack: Sequence[str], output: Any, storages: Iterable[Hashable]) -> None:
        """`stack`: the blocks around it; `storages` those that it returns."""
        returned = tuple(storages)
        self.read(returned, (*stack, fqn))
        self._owner.update(dict.fromkeys(returned, fqn))
        self._last[_parent(fqn)] = _Ended(fqn, self._given.pop(), output, random.getstate())

    def ran(self, func: Any, storages: Iterable[Hashable], stack: Sequence[str]) -> None:
        """An operator read these."""
        self.read(storages, stack)
        if torch.Tag.nondeterministic_seeded in func.tags or "_local_scalar_dense" in str(func):
            inside = {_parent(fqn) for fqn in stack}
            for parent, last in self._last.items():
                last.broken |= parent not in inside

    def read(self, storages: Iterable[Hashable], stack: Sequence[str]) -> None:
        for storage in storages:
            owner = self._owner.get(storage)
            if owner is not None and owner not in stack:
                siblings = (fqn for fqn in stack if _parent(fqn) == _parent(owner))
                self._readers[owner].add(next(siblings, ""))

    def forget(self) -> None:
        """Lets go of what blocks were given and returned: autograd's graph behind it holds whoever watched it."""
        self._last.clear()
        self._given.clear()

    def follows(self, fqn: str) -> str:
        """The sibling that this block follows in every call; the empty string: there is none."""
        before = set(self._before.get(fqn, ()))
        if len(before) != 1:
            return ""
        (sibling,) = before
        as_often = len(self._before[sibling]) == len(self._before[fqn]) if sibling else False
        return sibling if as_often and self._readers[sibling] <= {fqn} else ""


def _parent(fqn: str) -> str:
    """The model itself stands below nothing that has a name."""
    return fqn.rpartition(".")[0] if fqn else "."
