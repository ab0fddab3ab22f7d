"""Blocks by pattern: `layers.*.mlp` names the mlp of every layer; a star stands for one part of a dotted path."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

import msgspec

from explorer.errors import InvalidPolicy, nearest
from explorer.plan.names import Fqns
from explorer.record.policy import Policy, Unit

_MOST_COMPARED = 1_000_000


def is_pattern(name: str) -> bool:
    return "*" in name


def matching(pattern: str, fqns: Collection[str]) -> Fqns:
    """In the order of `fqns`, without the model itself. Raises InvalidPolicy where nothing matches."""
    parts = pattern.split(".")
    matched = tuple(fqn for fqn in fqns if fqn and _match(fqn.split("."), parts))
    if not matched:
        depth = [fqn for fqn in fqns if fqn.count(".") == len(parts) - 1]
        raise InvalidPolicy(
            f"No block matches {pattern!r}.",
            hint=nearest(pattern.replace("*", "0"), depth) or "A star stands for one part: blocks.*.mlp.",
        )
    return matched


def expanded(policy: Policy, fqns: Collection[str]) -> Policy:
    """`policy` with each unit of patterns replaced by one unit a match. Raises InvalidPolicy.

    A block that another unit names in full is left to that unit: `blocks.*` and `blocks.3` with an action of its own.
    """
    if not any(map(is_pattern, policy.blocks)):
        return policy
    patterns = {fqn for fqn in policy.blocks if is_pattern(fqn)}
    if len(patterns) * len(fqns) > _MOST_COMPARED:
        raise InvalidPolicy(
            f"The policy names {len(patterns)} patterns for a model of {len(fqns)} blocks, which is too many to try.",
            hint="Name the blocks in full, or take fewer patterns.",
        )
    named = {fqn for fqn in policy.blocks if not is_pattern(fqn)}
    units: dict[Unit, None] = {}
    for unit in dict.fromkeys(policy.units):
        if not any(map(is_pattern, unit.blocks)):
            units[unit] = None
            continue
        for blocks in matches(unit, fqns):
            if named.isdisjoint(blocks):
                units[msgspec.structs.replace(unit, blocks=blocks)] = None
    return msgspec.structs.replace(policy, units=tuple(units))


def matches(unit: Unit, fqns: Collection[str]) -> tuple[Fqns, ...]:
    """The blocks of each unit that `unit` stands for: in a segment the stars of all its patterns mean the same."""
    columns = [{_stars(fqn, pattern): fqn for fqn in matching(pattern, fqns)} for pattern in unit.blocks]
    rows = tuple(tuple(column[stars] for column in columns) for stars in columns[0] if all(stars in c for c in columns))
    if not rows:
        raise InvalidPolicy(
            f"No blocks match {' and '.join(map(repr, unit.blocks))} together.",
            hint="In a segment the stars stand for the same parts: [blocks.*.attention, blocks.*.mlp].",
        )
    return rows


def _match(parts: list[str], pattern: list[str]) -> bool:
    return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))


def _stars(fqn: str, pattern: str) -> Fqns:
    return tuple(part for part, wanted in zip(fqn.split("."), pattern.split(".")) if is_pattern(wanted))
