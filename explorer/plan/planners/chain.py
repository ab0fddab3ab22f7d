"""The exact plan of a chain: a dynamic program over its places, with every stretch of blocks as a segment.

A place is a block of the chain, or a part of the model before, between or behind its blocks. The ticks of a place are
those of its forward and of its backward. An item covers consecutive places: a segment, or a choice inside one place.

    places     0 | 1 | 2 | 3 | 4 | 5
    items      keep   [1 . 2 . 3)  [4 with its mlp]   keep

While a place runs, earlier items hold fewer bytes by a constant, and later items hold nothing. So later places depend
on a label only: (change of bytes by earlier items, cost). A label that is worse in both than another is dropped. Bytes
that are not constant (a skip, an input that two items keep) are read twice. The bound takes the lowest reading, and a
solution the highest. The exact forecast judges each solution.

solve.py plans every other model. There a place has too many choices for a list of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from explorer.plan.memory.ledger import Bytes
from explorer.plan.planners.solve import LEAST_SECONDS, Limits, Solution
from explorer.plan.planners.solver import TOLERANCE

MOST_TRIES = 6
GRAIN = 1e-6
"""Costs are counted in this share of the step over the number of places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Candidates that are recomputed together over the places from `first` to before `end`."""

    chosen: tuple[int, ...]
    first: int
    end: int
    cost: tuple[int, int]
    """Cost in grains, rounded down and rounded up."""
    need: tuple[float, float]
    """Peak bytes at ticks of the item's places if earlier places are kept: a lower and an upper reading."""
    held: tuple[float, float]
    """Change of bytes at ticks of later places, mostly below 0: a lower and an upper reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainItems:
    """The items of a chain."""

    items: Sequence[Item]
    """Each place has an item without candidates, which keeps the place."""
    n_places: int
    behind: float
    """Peak bytes between forward and backward of all places."""
    grain: float
    """The cost of one grain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Labels:
    """The labels at one place, by bytes."""

    held: NDArray[np.float64]
    cost: NDArray[np.int64]
    item: NDArray[np.intp]
    before: NDArray[np.intp]
    """The label at the first place of the item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheapest:
    """A solution of the dynamic program."""

    bound: float
    """Lower bound of the cost of all choices that the readings allow."""
    chosen: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class ChainProgram:
    """The program of a measured chain, shared by all its plans; the interface is that of Program in solve.py."""

    line: Bytes
    places: ChainItems
    cost: Callable[[tuple[int, ...]], float]
    peak_of: Callable[[tuple[int, ...]], int]
    suggested: tuple[tuple[int, ...], ...] = ()
    _judged: dict[tuple[int, ...], int] = field(default_factory=dict)
    _n_solves: int = 0

    def judged(self, chosen: tuple[int, ...]) -> int:
        """Peak bytes of a choice by the exact forecast."""
        if chosen not in self._judged:
            self._judged[chosen] = self.peak_of(chosen)
        return self._judged[chosen]

    def solve(self, limits: Limits) -> Solution | None:
        """The best choice within `limits`; None if there is none."""
        self._n_solves = 0
        ends = time.monotonic() + limits.seconds
        for chosen in ((), *self.suggested):
            self.judged(chosen)
        if limits.budget_bytes is not None:
            return self._within(limits.budget_bytes)
        return self._lowest(float("inf") if limits.most_cost is None else limits.most_cost * (1 + 1e-9), ends)

    def lowest_bytes(self) -> int:
        """Lower bound of the peak bytes of all policies."""
        return int(self._least_budget(float("inf"), time.monotonic() + LEAST_SECONDS, high=False)[0])

    def _within(self, budget: int) -> Solution | None:
        low = self._cheapest(budget, high=False)
        if low is None:
            return None
        bound = low.bound
        tried = self._cheapest(budget, high=True)
        self._judge(low, tried)
        aim, best = budget, self._best_within(budget)
        for _ in range(MOST_TRIES):
            if low is None or (best is not None and best[0] * (1 - TOLERANCE / 2) <= bound):
                break
            aim -= max(self.judged(low.chosen) - budget, 1)
            low = self._cheapest(aim, high=False)
            self._judge(low)
            best = self._best_within(budget)
        return None if best is None else self._solution(best[1], best[0], bound)

    def _lowest(self, most_cost: float, ends: float) -> Solution:
        """The lowest peak of the choices that cost at most `most_cost`."""
        bound, low = self._least_budget(most_cost, ends, high=False)
        self._judge(low)
        within = {chosen: peak for chosen, peak in self._judged.items() if self.cost(chosen) <= most_cost}
        if min(within.values()) - bound >= 2:
            self._judge(self._least_budget(most_cost, ends, high=True)[1])
            within |= {chosen: peak for chosen, peak in self._judged.items() if self.cost(chosen) <= most_cost}
        best = min(within, key=lambda chosen: (within[chosen], self.cost(chosen)))
        return self._solution(best, float(within[best]), bound)

    def _least_budget(self, most_cost: float, ends: float, *, high: bool) -> tuple[float, Cheapest | None]:
        """The least feasible budget by bisection over whole bytes, and a choice within the budget."""
        below, least = 0, int(self.line.max())
        answer: Cheapest | None = None
        while least - below > 1 and time.monotonic() < ends:
            middle = (below + least) // 2
            found = self._cheapest(middle, high=high, most_cost=most_cost)
            if found is None:
                below = middle
            else:
                least, answer = middle, found
        return below + 1, answer

    def _judge(self, *answers: Cheapest | None) -> None:
        for answer in answers:
            if answer is not None:
                self.judged(answer.chosen)

    def _best_within(self, budget: int) -> tuple[float, tuple[int, ...]] | None:
        within = [(self.cost(chosen), chosen) for chosen, peak in self._judged.items() if peak <= budget]
        return min(within, default=None)

    def _solution(self, chosen: tuple[int, ...], value: float, bound: float) -> Solution:
        return Solution(
            chosen=chosen,
            value=value,
            bound=min(bound, value),
            n_rows=self.places.n_places + 1,
            n_solves=self._n_solves,
        )

    def _cheapest(self, budget: int, *, high: bool, most_cost: float = float("inf")) -> Cheapest | None:
        """The cheapest items whose readings are within the budget; None if there are none."""
        self._n_solves += 1
        n_places = self.places.n_places
        from_place: list[list[int]] = [[] for _ in range(n_places)]
        for number, item in enumerate(self.places.items):
            from_place[item.first].append(number)
        parts: list[list[_Labels]] = [[] for _ in range(n_places + 1)]
        none, most = np.array([-1]), most_cost / self.places.grain
        parts[0] = [_Labels(held=np.zeros(1), cost=np.zeros(1, dtype=np.int64), item=none, before=none)]
        known: list[_Labels] = []
        for place in range(n_places + 1):
            labels = _undominated(parts[place])
            known.append(labels)
            for number in from_place[place] if place < n_places else ():
                item = self.places.items[number]
                cost = labels.cost + item.cost[high]
                fits = np.flatnonzero((labels.held <= budget - item.need[high]) & (cost <= most))
                if len(fits):
                    parts[item.end].append(
                        _Labels(
                            held=labels.held[fits] + item.held[high],
                            cost=cost[fits],
                            item=np.full(len(fits), number),
                            before=fits,
                        )
                    )
        last = known[-1]
        fits = np.flatnonzero(last.held <= budget - self.places.behind)
        if not len(fits):
            return None
        label = int(fits[last.cost[fits].argmin()])
        return Cheapest(
            bound=float(last.cost[label]) * self.places.grain, chosen=tuple(sorted(self._traced(known, label)))
        )

    def _traced(self, known: Sequence[_Labels], label: int) -> Iterator[int]:
        """The candidates on the path to a label of the last place."""
        place = self.places.n_places
        while place:
            item = self.places.items[int(known[place].item[label])]
            label, place = int(known[place].before[label]), item.first
            yield from item.chosen


def _undominated(parts: Sequence[_Labels]) -> _Labels:
    """The labels that no other label beats, by ascending bytes and descending cost."""
    held, cost, item, before = (
        np.concatenate([np.zeros(0, dtype=kind), *(getattr(part, name) for part in parts)])
        for name, kind in (("held", float), ("cost", np.int64), ("item", np.intp), ("before", np.intp))
    )
    order = np.lexsort((cost, held))
    cheapest = np.minimum.accumulate(cost[order]) if len(order) else cost
    order = order[np.append(True, cost[order][1:] < cheapest[:-1])[: len(order)]]
    return _Labels(held=held[order], cost=cost[order], item=item[order], before=before[order])
