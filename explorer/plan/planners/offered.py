"""Units offered to a planner: every module that runs and saves tensors, and stretches of blocks in a chain.

A segment keeps one input for several blocks. Segments matter if inputs are most of the saved bytes: in a chain of
single operations, which alone free nothing, and for the lowest peaks of a chain of blocks.

A chain of few choices (places.py) gets stretches of every length. Another model gets the shortest stretches. All units
of presets are offered too, so that a plan is never worse than a preset.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from explorer.errors import InvalidPolicy
from explorer.plan.names import Fqns, lineage
from explorer.plan.policy.counted import counted_units, runs
from explorer.plan.policy.presets import preset, preset_titles
from explorer.record.graph import ModelGraph
from explorer.record.policy import Unit

Named = str | Fqns | Unit
"""A block, a segment, or a unit with its action."""
MOST_CANDIDATES = 800
"""A model with more candidates loses the modules inside repeated blocks, so that solving takes seconds."""
MOST_SEGMENTS = 24
"""Limit of stretches outside chains of few choices: a length that would exceed the limit is not offered."""
MOST_STRETCHES = 600
"""Limit of stretches in a chain of few choices: above the limit only lengths in equal ratios are offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedChoices:
    """The units that a planner may choose from."""

    among: tuple[Named, ...] | None = None
    """The units to choose from; None means the result of `offered`."""
    without: tuple[Named, ...] = ()
    """Excluded units, such as segments that the model refuses."""
    every_stretch: bool = False


def offered(graph: ModelGraph, *, every_stretch: bool = False) -> list[Fqns]:
    """The offered units, single blocks first."""
    singles = [block.fqn for block in graph.blocks if block.fqn and block.n_calls and block.saved_bytes]
    if len(singles) > MOST_CANDIDATES:
        repeated = set(graph.repeats)
        singles = [fqn for fqn in singles if repeated.isdisjoint(list(lineage(fqn))[1:])]
    counted = (unit for unit in counted_units(graph) if len(unit) > 1)
    stretches = _of_all_lengths(chains(graph)) if every_stretch else _of_few_lengths(chains(graph))
    return [*((fqn,) for fqn in singles), *dict.fromkeys((*counted, *stretches))]


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


def chains(graph: ModelGraph) -> list[Fqns]:
    """Blocks that hand on to each other, in order of execution: what presets count with what lies between, or the
    graph's own chain where that has the longer stretch."""
    counted = {fqn for unit in counted_units(graph) for fqn in unit}
    around = {above for fqn in counted for above in lineage(fqn)}
    between = {fqn for fqn in graph.chain if fqn not in around and counted.isdisjoint(lineage(fqn))}
    levels = [_stretches(graph, level) for level in (counted | between, set(graph.chain))]
    return max(levels, key=lambda level: max(map(len, level), default=0))


def _stretches(graph: ModelGraph, fqns: Collection[str]) -> list[Fqns]:
    blocks = [(block.fqn,) for block in graph.blocks if block.fqn in fqns and block.n_calls]
    return [tuple(fqn for unit in stretch for fqn in unit) for stretch in runs(blocks, graph)]


def _of_few_lengths(chains: Sequence[Fqns]) -> Iterator[Fqns]:
    n_offered = 0
    for length in range(2, max(map(len, chains), default=0) + 1):
        windows = list(_windows(chains, length))
        n_offered += len(windows)
        if n_offered > MOST_SEGMENTS:
            break
        yield from windows


def _of_all_lengths(chains: Sequence[Fqns]) -> Iterator[Fqns]:
    longest = max(map(len, chains), default=0)
    lengths: Iterable[int] = range(2, longest + 1)
    n_lengths = longest - 1
    while sum(len(list(_windows(chains, length))) for length in lengths) > MOST_STRETCHES and n_lengths > 1:
        n_lengths -= 1
        lengths = np.unique(np.geomspace(2, longest, n_lengths).round().astype(int)).tolist()
    for length in lengths:
        yield from _windows(chains, length)


def _windows(chains: Sequence[Fqns], length: int) -> Iterator[Fqns]:
    for chain in chains:
        yield from (chain[first : first + length] for first in range(len(chain) - length + 1))
