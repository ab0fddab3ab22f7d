"""Every rival, found by its file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from explorer.errors import BadInput, nearest
from explorer.plan.arena import rivals as files
from explorer.plan.arena.rival import Rival

OURS = "explorer"


@cache
def rivals() -> dict[str, Rival]:
    """By name, in the order in which they are shown."""
    by_name: dict[str, Rival] = {
        module.name.replace("_", "-"): import_module(f"{files.__name__}.{module.name}").RIVAL
        for module in iter_modules(files.__path__)
    }
    return dict(sorted(by_name.items(), key=lambda named: (named[1].place, named[0])))


def chosen(names: Sequence[str]) -> dict[str, Rival]:
    """Those named, all where none is. Raises BadInput that offers the nearest names."""
    known = rivals()
    strangers = [name for name in names if name not in known]
    if strangers:
        raise BadInput(
            f"The arena has no rival {', '.join(map(repr, strangers))}.",
            hint=nearest(strangers[0], known) or f"It has {', '.join(known)}.",
        )
    return {name: rival for name, rival in known.items() if not names or name in names}


def parse_shares(text: str) -> tuple[float, ...]:
    """`0.3,0.5` or `30%,50%`. Raises BadInput."""
    shares = []
    for part in text.split(","):
        word = part.strip()
        try:
            share = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise BadInput(
                f"{word!r} is no share of the peak with everything kept.", hint="Shares lie in 0 to 1: 0.3,0.5,0.7,0.9."
            )
        shares.append(share)
    return tuple(dict.fromkeys(shares))
