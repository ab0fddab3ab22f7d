"""The names of a model's blocks in few lines: `blocks.*.mlp: 12`. What is new or gone is told by holding two of them
against each other; numbers count, kinds and sizes are left to the fingerprint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from explorer.plan.names import listed

MOST_TOLD = 4


def shape_of(fqns: Iterable[str]) -> dict[str, int]:
    """How many blocks there are of each name, with every number in a name written as a star."""
    return dict(Counter(".".join("*" if part.isdecimal() else part for part in fqn.split(".")) for fqn in fqns if fqn))


def differences(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """`blocks.* are 16, and were 12; new: adapter; gone: norm`. Empty: the same names."""
    # What lies inside of something that is named already says nothing more.
    counts = _outermost({name: None for name in before if now.get(name, 0) not in (0, before[name])})
    new, gone = (
        _outermost({name: None for name in one if name not in other}) for one, other in ((now, before), (before, now))
    )
    parts = [listed([f"{name} {_are(now[name])}, and {_were(before[name])}" for name in counts], MOST_TOLD)]
    parts += [f"{word}: {listed(names, MOST_TOLD)}" for word, names in (("new", new), ("gone", gone)) if names]
    return "; ".join(filter(None, parts))


def _outermost(names: Mapping[str, None]) -> list[str]:
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _are(n: int) -> str:
    return "is 1" if n == 1 else f"are {n}"


def _were(n: int) -> str:
    return "was 1" if n == 1 else f"were {n}"
