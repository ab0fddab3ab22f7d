"""Blocks of a policy by name: patterns, the names of a model in few lines, and the clicks of the graph.

`layers.*.mlp` is the mlp of every layer; a star stands for one part of a dotted path. `blocks.*.mlp: 12` counts names,
so that two models can be compared. A click in the graph switches a block on or off, and the units follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import groupby

from msgspec.structs import replace

from explorer.errors import InvalidPolicy, nearest
from explorer.plan.names import Fqns, listed, outermost
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit

_MOST_COMPARED = 1_000_000
_MOST_PATTERNS, _LONGEST_PATTERN = 1000, 300


def is_pattern(name: str) -> bool:
    return "*" in name


def matching(pattern: str, fqns: Collection[str]) -> Fqns:
    """Matching blocks in the order of `fqns`, without the model itself. Raises InvalidPolicy if nothing matches."""
    parts = pattern.split(".")
    depth = [fqn for fqn in fqns if fqn and fqn.count(".") == len(parts) - 1]
    matched = tuple(fqn for fqn in depth if all(map(fnmatchcase, fqn.split("."), parts)))
    if not matched:
        raise InvalidPolicy(
            f"No block matches {pattern!r}.",
            hint=nearest(pattern.replace("*", "0"), depth) or "A star stands for one part: blocks.*.mlp.",
        )
    return matched


def expanded(policy: Policy, fqns: Collection[str]) -> Policy:
    """`policy` with each unit of patterns replaced by one unit a match. Raises InvalidPolicy.

    A block that another unit names in full belongs to that unit: `blocks.*`, and `blocks.3` with another action.
    """
    if not any(map(is_pattern, policy.blocks)):
        return policy
    _refuse_costly({fqn for fqn in policy.blocks if is_pattern(fqn)}, len(fqns))
    named = {fqn for fqn in policy.blocks if not is_pattern(fqn)}
    units: dict[Unit, None] = {}
    for unit in dict.fromkeys(policy.units):
        if not any(map(is_pattern, unit.blocks)):
            units[unit] = None
            continue
        for blocks in matches(unit, fqns):
            if named.isdisjoint(blocks):
                units[replace(unit, blocks=blocks)] = None
    return replace(policy, units=tuple(units))


def _refuse_costly(patterns: Collection[str], n_names: int) -> None:
    if len(patterns) > _MOST_PATTERNS or len(patterns) * n_names > _MOST_COMPARED:
        raise InvalidPolicy(
            f"The policy names {len(patterns)} patterns for a model of {n_names} blocks, which is too many to try.",
            hint="Name the blocks in full, or take fewer patterns.",
        )
    longest = max(map(len, patterns), default=0)
    if longest > _LONGEST_PATTERN:
        raise InvalidPolicy(
            f"A pattern of {longest:,} letters is longer than the name of any block.",
            hint="A star stands for one part: blocks.*.mlp.",
        )


def matches(unit: Unit, fqns: Collection[str]) -> tuple[Fqns, ...]:
    """The blocks of each unit that `unit` stands for: in a segment the stars of all its patterns mean the same."""
    columns = [{_stars(fqn, pattern): fqn for fqn in matching(pattern, fqns)} for pattern in unit.blocks]
    stars = [key for key in columns[0] if all(key in column for column in columns)]
    rows = tuple(tuple(column[key] for column in columns) for key in stars)
    if not rows:
        raise InvalidPolicy(
            f"No blocks match {' and '.join(map(repr, unit.blocks))} together.",
            hint="In a segment the stars stand for the same parts: [blocks.*.attention, blocks.*.mlp].",
        )
    return rows


def _stars(fqn: str, pattern: str) -> Fqns:
    return tuple(part for part, star in zip(fqn.split("."), pattern.split(".")) if is_pattern(star))


MOST_TOLD = 4


def shape_of(fqns: Iterable[str]) -> dict[str, int]:
    """The number of blocks of each name, with every number in a name written as a star."""
    return dict(Counter(map(_starred, filter(None, fqns))))


def _starred(fqn: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in fqn.split("."))


def differences(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """`blocks.* are 16, and were 12; new: adapter; gone: norm`. Empty: the same names."""
    # A name inside another listed name adds nothing.
    counts = outermost(name for name in before if now.get(name, 0) not in (0, before[name]))
    new = outermost(name for name in now if name not in before)
    gone = outermost(name for name in before if name not in now)
    changed = [
        f"{name} {_number(now[name], 'is', 'are')}, and {_number(before[name], 'was', 'were')}" for name in counts
    ]
    parts = [listed(changed, MOST_TOLD)]
    for word, names in (("new", new), ("gone", gone)):
        if names:
            parts.append(f"{word}: {listed(names, MOST_TOLD)}")
    return "; ".join(filter(None, parts))


def _number(n: int, singular: str, plural: str) -> str:
    return f"{singular if n == 1 else plural} {n}"


def policy_after(policy: Policy, on: Collection[str], graph: ModelGraph) -> Policy:
    """`policy` with exactly the blocks in `on` recomputed.

    A unit whose blocks are all in `on` stays unchanged, action included. A segment that lost a block splits into the
    remaining runs. A new block becomes a separate unit. Units stand in module order.
    """
    marked = set(on)
    units: list[Unit] = []
    for unit in policy.units:
        runs = (tuple(run) for is_marked, run in groupby(unit.blocks, marked.__contains__) if is_marked)
        units += [replace(unit, blocks=run) for run in runs]
    in_units = {fqn for unit in units for fqn in unit.blocks}
    units += [Unit(blocks=(fqn,)) for fqn in marked - in_units]
    place = {block.fqn: i for i, block in enumerate(graph.blocks)}
    units.sort(key=lambda unit: place.get(unit.blocks[0], len(place)))
    return replace(policy, units=tuple(units))


def joined(policy: Policy, first: str, second: str) -> Policy:
    """`policy` with the units that hold `first` and `second` made one segment."""
    holding = [unit for unit in policy.units if first in unit.blocks or second in unit.blocks]
    if len(holding) != 2:
        return policy
    merged = replace(holding[0], blocks=(*holding[0].blocks, *holding[1].blocks))
    units = tuple(merged if unit is holding[0] else unit for unit in policy.units if unit is not holding[1])
    return replace(policy, units=units)


def unknown_blocks(policy: Policy, graph: ModelGraph) -> tuple[str, ...]:
    """Blocks that the policy names and the model lacks."""
    return tuple(fqn for fqn in policy.blocks if fqn not in graph.by_fqn)
