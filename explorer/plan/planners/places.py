"""The places and items of chain.py, read from the forecasts of single choices.

A model is a chain of few choices if each candidate is a stretch of its chain, or lies in one place. A candidate may
also hold all places of a stretch. A candidate that holds places is an item with nothing inside; so is a segment.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorer.plan.memory.ledger import Bytes
from explorer.plan.names import is_within, lineage
from explorer.plan.planners.candidates import Candidates
from explorer.plan.planners.chain import GRAIN, ChainItems, Item
from explorer.plan.planners.keeping import is_kept_apart
from explorer.plan.planners.offered import chains
from explorer.plan.predict.calls import saved_by_calls
from explorer.plan.predict.replay import Replay
from explorer.record.graph import ModelGraph

MOST_INSIDE = 6
"""Candidates of one place: a place has at most as many choices as these have subsets."""
MOST_CHOICES = 1500
"""Choices of all places together; each is forecast once."""
MOST_PLACES = 200
LineOf = Callable[[tuple[int, ...]], Bytes]
"""Function from candidates to the predicted line with these candidates recomputed."""


def is_chain_of_few(graph: ModelGraph) -> bool:
    """True if the model has a chain of blocks with few modules each; `places_of` checks the details."""
    names = {fqn: 0 for chain in chains(graph) if len(chain) > 2 for fqn in chain}
    for block in graph.blocks:
        if block.n_calls and block.saved_bytes:
            above = next((fqn for fqn in lineage(block.fqn) if fqn in names), None)
            if above is not None:
                names[above] += 1
    return 0 < len(names) <= MOST_PLACES and max(names.values()) <= MOST_INSIDE


def places_of(
    replay: Replay, candidates: Candidates, stretches: Sequence[Sequence[str]], line_of: LineOf
) -> ChainItems | None:
    """The places and items of the chain; None if the model is no chain of few choices."""
    blocks = _blocks(replay, candidates, stretches)
    within = None if blocks is None else _within(candidates, blocks)
    ticks = None if blocks is None else _place_of_tick(replay, blocks)
    if blocks is None or within is None or ticks is None:
        return None
    grain = GRAIN * (candidates.step_cost or 1.0) / len(blocks)
    reading = _Reading(line=replay.line, ticks=ticks, bonus=_given_twice(replay, candidates, within), grain=grain)
    items = []
    for chosen, (first, end) in within:
        cost = candidates.cost(chosen)
        item = reading.item(chosen, (first, end), cost, line_of(chosen))
        if item is None:
            return None
        items.append(item)
    behind = replay.line[ticks == len(blocks)]
    return ChainItems(items=tuple(items), n_places=len(blocks), behind=float(behind.max(initial=0)), grain=grain)


def _blocks(replay: Replay, candidates: Candidates, stretches: Sequence[Sequence[str]]) -> list[str] | None:
    """The block of each place, in order of execution; None if a block runs more than once, or inside another's call."""
    blocks = dict.fromkeys(fqn for stretch in stretches for fqn in stretch)
    holders = {above for fqn in blocks for above in lineage(fqn)}
    named = {fqn for one in candidates.units for fqn in one.unit.blocks}
    for fqn in named - holders:
        outer = [above for above in lineage(fqn) if above in named and above not in holders]
        if not any(above in blocks for above in lineage(fqn)):
            blocks[outer[-1]] = None
    if not all(len(replay.calls.get(fqn, ())) == 1 for fqn in blocks):
        return None
    order = sorted(blocks, key=lambda fqn: replay.calls[fqn][0].first)
    calls = [replay.calls[fqn][0] for fqn in order]
    return order if all(one.end <= after.first for one, after in itertools.pairwise(calls)) else None


def _within(candidates: Candidates, blocks: Sequence[str]) -> list[tuple[tuple[int, ...], tuple[int, int]]] | None:
    """Every choice, with its first and its end place; None if there are too many choices."""
    number = {fqn: place for place, fqn in enumerate(blocks)}
    choices: list[tuple[tuple[int, ...], tuple[int, int]]] = []
    inside: list[list[int]] = [[] for _ in blocks]
    for i, one in enumerate(candidates.units):
        named = [next((number[above] for above in lineage(fqn) if above in number), None) for fqn in one.unit.blocks]
        places = sorted({place for place in named if place is not None})
        if None in named:  # the candidate contains places
            places = [place for fqn, place in number.items() if is_within(fqn, one.unit.blocks[0])]
        if not places or places[-1] - places[0] + 1 != len(places):
            return None
        if len(places) == 1 and None not in named:
            inside[places[0]].append(i)
        else:
            choices.append(((i,), (places[0], places[-1] + 1)))
    if any(len(some) > MOST_INSIDE for some in inside):
        return None
    choices += [
        (chosen, (place, place + 1))
        for place, some in enumerate(inside)
        for n in range(len(some) + 1)
        for chosen in itertools.combinations(some, n)
        if _is_policy(candidates, chosen)
    ]
    return choices if len(choices) <= MOST_CHOICES else None


def _is_policy(candidates: Candidates, chosen: tuple[int, ...]) -> bool:
    """True if no two units share a block, nesting has two levels at most, and units that keep results do not nest."""
    units = [candidates.units[i].unit for i in chosen]
    if any(sum(o in chosen for o in candidates.around[i]) > 1 for i in chosen):
        return False
    for one, other in itertools.permutations(units, 2):
        if not set(one.blocks).isdisjoint(other.blocks):
            return False
        if is_kept_apart(one) and any(is_within(a, b) or is_within(b, a) for a in one.blocks for b in other.blocks):
            return False
    return True


def _place_of_tick(replay: Replay, blocks: Sequence[str]) -> NDArray[np.intp] | None:
    """The place of each tick; None if backward does not run through the places from the last to the first."""
    calls = [replay.calls[fqn][0] for fqn in blocks]
    begins = len(replay.line)
    begin_of = []
    for fqn in blocks:
        saved = saved_by_calls(replay, (fqn,), stops_early=True)
        following = saved[0].begins - 1 if saved else begins  # a place without a backward has no ticks there
        if following > begins:
            return None
        begins = following
        begin_of.append(begins)
    if calls[-1].end > begins:
        return None
    ticks = np.full(len(replay.line), len(blocks), dtype=np.intp)
    end = len(ticks)
    for place, begin in enumerate(begin_of):
        ticks[begin:end] = place
        end = begin
    for place, call in enumerate(calls):
        ticks[
            call.first + 1 if place else 0 : calls[place + 1].first + 1 if place + 1 < len(calls) else call.end + 1
        ] = place
    return ticks


def _given_twice(
    replay: Replay, candidates: Candidates, within: Sequence[tuple[tuple[int, ...], tuple[int, int]]]
) -> dict[int, int]:
    """Bytes of inputs that each candidate keeps and a candidate of another place keeps too, by candidate."""
    firsts: dict[int, set[int]] = defaultdict(set)
    place_of = {i: first for chosen, (first, _) in within for i in chosen}
    for i, one in enumerate(candidates.units):
        for call in one.calls:
            for entry in call.inputs:
                firsts[entry].add(place_of.get(i, -1))
    return {
        i: sum(
            int(replay.size[entry])
            for call in one.calls
            for entry in set(call.inputs)
            if len(firsts[entry]) > 1
        )
        for i, one in enumerate(candidates.units)
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    line: Bytes
    ticks: NDArray[np.intp]
    bonus: dict[int, int]
    grain: float

    def item(self, chosen: tuple[int, ...], places: tuple[int, int], cost: float, line: Bytes) -> Item | None:
        """The item of a choice; None if the choice frees bytes at ticks of earlier places, which items may not do."""
        first, end = places
        more = line - self.line
        own, later = (first <= self.ticks) & (self.ticks < end), self.ticks >= end
        if (more[self.ticks < first] < 0).any():
            return None
        least = sum(self.bonus[i] for i in chosen)
        need = float(line[own].max(initial=0))
        after = more[later]
        grains = cost / self.grain
        return Item(
            chosen=chosen,
            first=first,
            end=end,
            cost=(int(np.floor(grains)), int(np.ceil(grains))),
            need=(need - least, need),
            held=(
                float(after.min(initial=0) if not len(after) else after.min()) - least,
                float(after.max()) if len(after) else 0.0,
            ),
        )
