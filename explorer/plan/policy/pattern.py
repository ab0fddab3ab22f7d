"""Blocks by pattern: `layers.*.mlp` names the mlp of every layer; a star stands for one part of a dotted path."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

import msgspec

from explorer.errors import InvalidPolicy, nearest
from explorer.record.policy import Policy, Unit


def is_pattern(name: str) -> bool:
    return "*" in name


def matching(pattern: str, fqns: Collection[str]) -> tuple[str, ...]:
    """In the order of `fqns`. Raises InvalidPolicy where nothing matches."""
    parts = pattern.split(".")
    found = tuple(fqn for fqn in fqns if _match(fqn.split("."), parts))
    if not found:
        depth = [fqn for fqn in fqns if fqn.count(".") == len(parts) - 1]
        raise InvalidPolicy(
            f"No block matches {pattern!r}.",
            hint=nearest(pattern.replace("*", "0"), depth) or "A star stands for one part: blocks.*.mlp.",
        )
    return found


def expanded(policy: Policy, fqns: Collection[str]) -> Policy:
    """`policy` with each unit that is one pattern replaced by one unit a block. Raises InvalidPolicy."""
    if not any(map(is_pattern, policy.blocks)):
        return policy
    units: dict[Unit, None] = {}
    for unit in policy.units:
        patterned = len(unit.blocks) == 1 and is_pattern(unit.blocks[0])
        for fqns_of in ((fqn,) for fqn in matching(unit.blocks[0], fqns)) if patterned else (unit.blocks,):
            units[msgspec.structs.replace(unit, blocks=fqns_of)] = None
    return msgspec.structs.replace(policy, units=tuple(units))


def _match(parts: list[str], pattern: list[str]) -> bool:
    return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))
