"""Finds siblings that could be one segment: each gets its predecessor's output, which no other block reads.

x = blocks[0](x, mask)                      blocks.1 follows blocks.0: its input is the output object of blocks.0, and
x = blocks[1](x, mask)                      its other arguments are those of blocks.0
x = blocks[2](x, mask); kept.append(x)      blocks.3 follows no block: the model later reads the output of blocks.2
if random() > 0.1: x = blocks[3](x, mask)   a block follows none if the model draws or reads a value before it
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
    """The latest ended call among the children of one parent."""

    fqn: str
    given: Arguments
    output: Any
    python_rng: Any
    broken: bool = False
    """Whether the model has drawn from torch or read a value since."""


class Turns:
    """Collects calls and operators in their order."""

    def __init__(self) -> None:
        self._last: dict[str, _Ended] = {}
        self._given: list[Arguments] = []
        self._before: dict[str, list[str]] = defaultdict(list)
        """For each call of a block, the sibling before it, or the empty string."""
        self._owner: dict[Hashable, str] = {}
        self._readers: dict[str, set[str]] = defaultdict(set)
        """The siblings that read a block's output; the empty string stands for all other readers."""

    def begins(self, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = arguments_of(args, kwargs)
        last = self._last.get(_parent(fqn))
        at_once = last is not None and not last.broken and last.python_rng == random.getstate()
        follows = last is not None and at_once and same_arguments(handed_on(last.output, last.given), given)
        self._before[fqn].append(last.fqn if last is not None and follows else "")
        self._given.append(given)

    def ends(self, fqn: str, stack: Sequence[str], output: Any, storages: Iterable[Hashable]) -> None:
        """Ends a call. `stack` has the blocks around it; `storages` are the storages of its output."""
        returned = tuple(storages)
        self.read(returned, (*stack, fqn))
        self._owner.update(dict.fromkeys(returned, fqn))
        self._last[_parent(fqn)] = _Ended(fqn, self._given.pop(), output, random.getstate())

    def ran(self, func: Any, storages: Iterable[Hashable], stack: Sequence[str]) -> None:
        """Notes that an operator read `storages`."""
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
        """Drops arguments and outputs of blocks: the autograd graph behind them holds the observer."""
        self._last.clear()
        self._given.clear()

    def follows(self, fqn: str) -> str:
        """The sibling that this block follows in every call; empty if there is none."""
        before = set(self._before.get(fqn, ()))
        if len(before) != 1:
            return ""
        (sibling,) = before
        as_often = len(self._before[sibling]) == len(self._before[fqn]) if sibling else False
        return sibling if as_often and self._readers[sibling] <= {fqn} else ""


def _parent(fqn: str) -> str:
    """fqn of the parent; `.` for the model itself, whose parent has no name."""
    return fqn.rpartition(".")[0] if fqn else "."
