"""Units that a planner is offered: every module that runs and saves something, and stretches of blocks in a chain.

A segment keeps one input for several blocks. It matters where inputs are most of what is kept: in a chain of single
operations, which alone free nothing, and for the lowest peaks of a chain of blocks.

Presets are offered as a whole beside them, with whatever segments they have: a plan shall never be worse than one.
"""

from __future__ import annotations

from collections.abc import Iterator

from explorer.errors import InvalidPolicy
from explorer.plan.names import Fqns, lineage
from explorer.plan.policy.counted import counted_units, runs
from explorer.plan.policy.presets import preset, preset_titles
from explorer.record.graph import ModelGraph
from explorer.record.policy import Unit

MOST_CANDIDATES = 800
"""A model with more is offered only what no repeated block holds: a program stays a matter of seconds."""
MOST_SEGMENTS = 24
"""Stretches of one length more are not offered where there would be more than that."""


def offered(graph: ModelGraph) -> list[Fqns]:
    """Single blocks first."""
    singles = [block.fqn for block in graph.blocks if block.fqn and block.n_calls and block.saved_bytes]
    if len(singles) > MOST_CANDIDATES:
        repeated = set(graph.repeats)
        singles = [fqn for fqn in singles if repeated.isdisjoint(list(lineage(fqn))[1:])]
    return [*((fqn,) for fqn in singles), *dict.fromkeys(_segments(graph))]


def offered_whole(graph: ModelGraph) -> list[tuple[Unit, ...]]:
    """The units of every preset that keeps less than everything."""
    wholes = []
    for name in preset_titles():
        try:
            units = preset(name, graph).units
        except InvalidPolicy:  # there is no block to count
            return []
        if units:
            wholes.append(units)
    return list(dict.fromkeys(wholes))


def _segments(graph: ModelGraph) -> Iterator[Fqns]:
    counted = counted_units(graph)
    yield from (unit for unit in counted if len(unit) > 1)
    stretches = [[fqn for unit in stretch for fqn in unit] for stretch in runs(counted, graph)]
    n_offered = 0
    for length in range(2, max(map(len, stretches), default=0) + 1):
        windows = [
            tuple(chain[first : first + length]) for chain in stretches for first in range(len(chain) - length + 1)
        ]
        n_offered += len(windows)
        if n_offered > MOST_SEGMENTS:
            break
        yield from windows
