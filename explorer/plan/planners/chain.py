"""The exact plan of a chain: a dynamic program over its places, with every stretch of blocks as a segment.

A place is a block of the chain, or a part of the model before, between or behind its blocks. The ticks of a place are
those of its forward and of its backward. An item covers consecutive places: a segment, or a choice inside one place.

    places     0 | 1 | 2 | 3 | 4 | 5
    items      keep   [1 . 2 . 3)  [4 with its mlp]   keep

While a place runs, earlier items hold fewer bytes by a constant, and later items hold nothing. So later places depend
on a label only: (change of bytes by earlier items, cost). A label that is worse in both than another is dropped. Bytes
that are not constant (a skip, an input that two items keep) are read low, for the bound. The integer program is then
solved beside this one (planner.py), because the forecast may reject what is found here.

In a chain of few choices a candidate is a stretch of the chain, lies in one place, or holds all places of a stretch.
Items are read from the forecasts of single choices. program.py plans every other model.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from explorer.plan.names import Fqns, is_within, lineage, nearest_around
from explorer.plan.planners.candidates import MOST_CHOICES, Candidates, chain_stretches, n_stretches
from explorer.plan.planners.program import LEAST_SECONDS, ForecastChoices, Limits, Solution
from explorer.plan.planners.solver import TOLERANCE
from explorer.plan.predict.calls import saved_by_calls
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.replay import Replay
from explorer.record.base import Record
from explorer.record.graph import ModelGraph

MOST_TRIES = 6
GRAIN = 1e-6
"""Costs are counted in this share of the step over the number of places."""


class Item(Record):
    """Candidates that are recomputed together over the places from `first` to before `end`."""

    chosen: tuple[int, ...]
    first: int
    end: int
    cost: int
    """Cost in grains, rounded down."""
    peak: float
    """Peak bytes at ticks of the item's places if earlier places are kept: the least."""
    change: float
    """Change of bytes at ticks of later places, mostly below 0: the least."""
    is_exact: bool
    """True if `peak` and `change` are the bytes whatever the other places recompute."""


class _Labels(NamedTuple):
    """The labels at one place, by change of bytes."""

    change: NDArray[np.float64]
    cost: NDArray[np.int64]
    item: NDArray[np.intp]
    before: NDArray[np.intp]
    """The label at the first place of the item."""


class Cheapest(NamedTuple):
    """A solution of the dynamic program."""

    bound: float
    """Lower bound of the cost of all choices that the readings allow."""
    chosen: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class ChainProgram(ForecastChoices):
    """The program of a measured chain, shared by all its plans; the interface is that of Program in program.py."""

    items: Sequence[Item]
    """Each place has an item without candidates, which keeps the place."""
    n_places: int
    n_stretches: int
    """Number of all stretches of the chains, candidates or not."""
    behind: float
    """Peak bytes between forward and backward of all places."""
    grain: float
    """The cost of one grain."""
    _n_solves: int = 0

    @property
    def is_exact(self) -> bool:
        """True if the bytes are constant: no skip connection, no input that two items keep."""
        return all(item.is_exact for item in self.items)

    def solve(self, limits: Limits) -> Solution | None:
        """The best choice within `limits`; None if there is none."""
        self._n_solves = 0
        ends = time.monotonic() + limits.seconds
        for chosen in ((), *self.suggested):
            self.peak(chosen)
        if limits.budget_bytes is not None:
            return self._within(limits.budget_bytes)
        return self._lowest(float("inf") if limits.most_cost is None else limits.most_cost * (1 + 1e-9), ends)

    def lowest_bytes(self) -> int:
        """Lower bound of the peak bytes of all policies."""
        return int(self._least_budget(float("inf"), time.monotonic() + LEAST_SECONDS)[0])

    def _within(self, budget: int) -> Solution | None:
        """The cheapest choice within the budget. An answer above it is asked again for as much less."""
        low = self._cheapest(budget)
        self.bound = bound = float("inf") if low is None else low.bound
        aim, best = budget, None
        for n_left in range(MOST_TRIES, -1, -1):
            if low is None:
                break
            aim -= max(self.peak(low.chosen) - budget, 1)
            fitting = ((self.candidates.cost(chosen), chosen) for chosen, peak in self._peaks.items() if peak <= budget)
            best = min(fitting, default=None)
            if best is not None and best[0] * (1 - TOLERANCE / 2) <= bound:
                break
            low = self._cheapest(aim) if n_left else None
        return None if best is None else self._solution(best[1], best[0], bound)

    def _lowest(self, most_cost: float, ends: float) -> Solution:
        """The lowest peak of the choices that cost at most `most_cost`."""
        self.bound, low = self._least_budget(most_cost, ends)
        if low is not None:
            self.peak(low.chosen)
        cost = self.candidates.cost
        within = {chosen: peak for chosen, peak in self._peaks.items() if cost(chosen) <= most_cost}
        best = min(within, key=lambda chosen: (within[chosen], cost(chosen)))
        return self._solution(best, float(within[best]), self.bound)

    def _least_budget(self, most_cost: float, ends: float) -> tuple[float, Cheapest | None]:
        """The least feasible budget by bisection over whole bytes, and a choice within the budget."""
        below, least = 0, int(self.line.max())
        answer: Cheapest | None = None
        while least - below > 1 and time.monotonic() < ends:
            middle = (below + least) // 2
            cheapest = self._cheapest(middle, most_cost=most_cost)
            if cheapest is None:
                below = middle
            else:
                least, answer = middle, cheapest
        return below + 1, answer

    def _solution(self, chosen: tuple[int, ...], value: float, bound: float) -> Solution:
        return Solution(
            chosen=chosen,
            value=value,
            bound=min(bound, value),
            n_rows=self.n_places + 1,
            n_solves=self._n_solves,
        )

    def _cheapest(self, budget: int, *, most_cost: float = float("inf")) -> Cheapest | None:
        """The cheapest items whose readings are within the budget; None if there are none."""
        self._n_solves += 1
        n_places = self.n_places
        from_place: list[list[int]] = [[] for _ in range(n_places + 1)]
        for number, item in enumerate(self.items):
            from_place[item.first].append(number)
        parts: list[list[_Labels]] = [[] for _ in range(n_places + 1)]
        none, most = np.array([-1]), most_cost / self.grain
        parts[0] = [_Labels(np.zeros(1), np.zeros(1, np.int64), none, none)]
        labels_at: list[_Labels] = []
        for place in range(n_places + 1):
            labels = _undominated(parts[place])
            labels_at.append(labels)
            for number in from_place[place]:
                item = self.items[number]
                cost = labels.cost + item.cost
                fits = np.flatnonzero((labels.change <= budget - item.peak) & (cost <= most))
                if len(fits):
                    change = labels.change[fits] + item.change
                    parts[item.end].append(_Labels(change, cost[fits], np.full(len(fits), number), fits))
        last = labels_at[-1]
        fits = np.flatnonzero(last.change <= budget - self.behind)
        if not len(fits):
            return None
        label = int(fits[last.cost[fits].argmin()])
        return Cheapest(float(last.cost[label]) * self.grain, tuple(sorted(self._traced(labels_at, label))))

    def _traced(self, labels_at: Sequence[_Labels], label: int) -> Iterator[int]:
        """The candidates on the path to a label of the last place."""
        place = self.n_places
        while place:
            item = self.items[int(labels_at[place].item[label])]
            label, place = int(labels_at[place].before[label]), item.first
            yield from item.chosen


def _undominated(parts: Sequence[_Labels]) -> _Labels:
    """The labels that no other label beats, by ascending bytes and descending cost."""
    none = _Labels(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.intp), np.zeros(0, np.intp))
    change, cost, item, before = map(np.concatenate, zip(none, *parts))
    order = np.lexsort((cost, change))
    cheapest = np.minimum.accumulate(cost[order]) if len(order) else cost
    order = order[np.append(True, cost[order][1:] < cheapest[:-1])[: len(order)]]
    return _Labels(change[order], cost[order], item[order], before[order])


MOST_INSIDE = 6
"""Candidates of one place: a place has at most as many choices as these have subsets."""
MOST_PLACES = 200


def is_chain_of_few(graph: ModelGraph) -> bool:
    """True if the model has a chain of blocks with few modules each; `chain_program` checks the details."""
    names = {fqn: 0 for chain in chain_stretches(graph) if len(chain) > 2 for fqn in chain}
    for block in graph.blocks:
        if block.n_calls and block.saved_bytes:
            above = nearest_around(block.fqn, names)
            if above is not None:
                names[above] += 1
    return 0 < len(names) <= MOST_PLACES and max(names.values()) <= MOST_INSIDE


def chain_program(forecaster: Forecaster, graph: ModelGraph, candidates: Candidates) -> ChainProgram | None:
    """The program of a chain; None if the model is no chain of few choices."""
    replay = forecaster.replay
    assert replay is not None, "the step has a timeline"
    chains = chain_stretches(graph)
    blocks = _blocks(replay, candidates, chains)
    if blocks is None:
        return None
    choices, ticks = _choices(candidates, blocks), _place_of_tick(replay, blocks)
    if choices is None or ticks is None:
        return None
    grain = GRAIN * (candidates.step_cost or 1.0) / len(blocks)
    twice = _inputs_kept_twice(replay, candidates, choices)
    items = []
    for chosen, (first, end) in choices:
        line = forecaster.line(candidates.policy(chosen))
        assert line is not None, "every candidate can be forecast"
        more = line - replay.line
        if (more[ticks < first] < 0).any():  # it frees bytes at ticks of earlier places, which items may not do
            return None
        least = sum(twice[i] for i in chosen)
        peak = float(line[(first <= ticks) & (ticks < end)].max(initial=0))
        after = more[ticks >= end] if (ticks >= end).any() else np.zeros(1)
        items.append(
            Item(
                chosen=chosen,
                first=first,
                end=end,
                cost=int(candidates.cost(chosen) / grain),
                peak=peak - least,
                change=float(after.min()) - least,
                is_exact=least == 0 and after.min() == after.max(),
            )
        )
    behind = float(replay.line[ticks == len(blocks)].max(initial=0))
    return ChainProgram(
        forecaster=forecaster,
        candidates=candidates,
        line=replay.line,
        items=tuple(items),
        n_places=len(blocks),
        n_stretches=n_stretches(chains),
        behind=behind,
        grain=grain,
    )


def _blocks(replay: Replay, candidates: Candidates, stretches: Sequence[Fqns]) -> list[str] | None:
    """The block of each place, in order of execution; None if a block runs more than once, or inside another's call."""
    blocks = dict.fromkeys(fqn for stretch in stretches for fqn in stretch)
    holders = set(lineage(*blocks))
    named = {fqn for candidate in candidates.units for fqn in candidate.unit.blocks}
    for fqn in named - holders:
        outer = [above for above in lineage(fqn) if above in named and above not in holders]
        if not any(above in blocks for above in lineage(fqn)):
            blocks[outer[-1]] = None
    if not all(len(replay.calls.get(fqn, ())) == 1 for fqn in blocks):
        return None
    order = sorted(blocks, key=lambda fqn: replay.calls[fqn][0].first)
    calls = [replay.calls[fqn][0] for fqn in order]
    follow = all(call.end <= after.first for call, after in itertools.pairwise(calls))
    return order if follow else None


def _choices(candidates: Candidates, blocks: Sequence[str]) -> list[tuple[tuple[int, ...], tuple[int, int]]] | None:
    """Every choice, with its first and its end place; None if there are too many choices."""
    number = {fqn: place for place, fqn in enumerate(blocks)}
    choices: list[tuple[tuple[int, ...], tuple[int, int]]] = []
    inside: list[list[int]] = [[] for _ in blocks]
    for i, candidate in enumerate(candidates.units):
        named = [nearest_around(fqn, number) for fqn in candidate.unit.blocks]
        places = sorted({number[place] for place in named if place is not None})
        if None in named:  # the candidate contains places
            places = [place for fqn, place in number.items() if is_within(fqn, candidate.unit.blocks[0])]
        if not places or places[-1] - places[0] + 1 != len(places):
            return None
        if len(places) == 1 and None not in named:
            inside[places[0]].append(i)
        else:
            choices.append(((i,), (places[0], places[-1] + 1)))
    if max(map(len, inside), default=0) > MOST_INSIDE:
        return None
    for place, units in enumerate(inside):
        for n in range(len(units) + 1):
            chosen = itertools.combinations(units, n)
            choices += [(some, (place, place + 1)) for some in chosen if _is_policy(candidates, some)]
    return choices if len(choices) <= MOST_CHOICES else None


def _is_policy(candidates: Candidates, chosen: tuple[int, ...]) -> bool:
    """True if no two units exclude each other, and nesting has two levels at most."""
    if any(len(set(chosen).intersection(candidates.around[i])) > 1 for i in chosen):
        return False
    return not any(itertools.starmap(candidates.exclude, itertools.combinations(chosen, 2)))


def _place_of_tick(replay: Replay, blocks: Sequence[str]) -> NDArray[np.intp] | None:
    """The place of each tick; None if backward does not run through the places from the last to the first."""
    calls = [replay.calls[fqn][0] for fqn in blocks]
    begins = len(replay.line)
    begin_of = []
    for fqn in blocks:
        saved = saved_by_calls(replay, (fqn,), stops_early=True)
        following = saved[0].backward_begins - 1 if saved else begins  # a place without a backward has no ticks there
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
    begins_at = [0, *(call.first + 1 for call in calls[1:]), calls[-1].end + 1]
    for place, (begin, end) in enumerate(itertools.pairwise(begins_at)):
        ticks[begin:end] = place
    return ticks


def _inputs_kept_twice(
    replay: Replay, candidates: Candidates, within: Sequence[tuple[tuple[int, ...], tuple[int, int]]]
) -> dict[int, int]:
    """Bytes of inputs that each candidate keeps and a candidate of another place keeps too, by candidate."""
    firsts: dict[int, set[int]] = defaultdict(set)
    place_of = {i: first for chosen, (first, _) in within for i in chosen}
    for i, candidate in enumerate(candidates.units):
        for entry in (entry for call in candidate.calls for entry in call.inputs):
            firsts[entry].add(place_of.get(i, -1))
    twice: dict[int, int] = defaultdict(int)
    for i, candidate in enumerate(candidates.units):
        for call in candidate.calls:
            twice[i] += sum(int(replay.size[entry]) for entry in set(call.inputs) if len(firsts[entry]) > 1)
    return twice
