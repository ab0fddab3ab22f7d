"""From marks in the graph to a policy and back, without a page: what is on, in which unit, in which order."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit


def policy_after(policy: Policy, on: Collection[str], graph: ModelGraph) -> Policy:
    """`policy` with exactly the blocks in `on` recomputed.

    A unit that keeps all its blocks stays as it is, its action included. A segment that lost a block falls into the
    runs that are left; a block that is new becomes a unit of its own. Units stand in module order.
    """
    marked = set(on)
    units: list[Unit] = []
    for unit in policy.units:
        units += [msgspec.structs.replace(unit, blocks=run) for run in _runs(unit.blocks, marked)]
    known = {fqn for unit in units for fqn in unit.blocks}
    units += [Unit(blocks=(fqn,)) for fqn in marked - known]
    place = {block.fqn: i for i, block in enumerate(graph.blocks)}
    units.sort(key=lambda unit: place.get(unit.blocks[0], len(place)))
    return msgspec.structs.replace(policy, units=tuple(units))


def _runs(blocks: Iterable[str], marked: set[str]) -> list[tuple[str, ...]]:
    runs: list[list[str]] = [[]]
    for fqn in blocks:
        if fqn in marked:
            runs[-1].append(fqn)
        elif runs[-1]:
            runs.append([])
    return [tuple(run) for run in runs if run]


def joined(policy: Policy, first: str, second: str) -> Policy:
    """`policy` with the units that hold `first` and `second` made one segment."""
    holding = [unit for unit in policy.units if first in unit.blocks or second in unit.blocks]
    if len(holding) != 2:
        return policy
    merged = msgspec.structs.replace(holding[0], blocks=(*holding[0].blocks, *holding[1].blocks))
    units = tuple(merged if unit is holding[0] else unit for unit in policy.units if unit is not holding[1])
    return msgspec.structs.replace(policy, units=units)


def unknown_blocks(policy: Policy, graph: ModelGraph) -> tuple[str, ...]:
    """Blocks that the policy names and the model lacks."""
    return tuple(fqn for fqn in policy.blocks if fqn not in graph.by_fqn)
