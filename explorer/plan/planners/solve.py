"""The small integer program behind every plan, solved with as few moments of the step as it needs.

All moments would be thousands of rows, of which a dozen bind. So: solve with those known, let the line that the answer
gives show where it is over the budget, add those moments as rows, solve again. Every row holds for every policy that
fits, so each answer's bound is a bound for all; the first answer that the exact forecast finds within the budget is
best. An answer that the rows call good and the forecast does not is forbidden by name.

Few moments tell few blocks apart: what they do not is counted (classes.py), and hundreds of equal blocks are a handful
of whole numbers. So only those moments are carried on that bind in fractions.

Time may end before the solver does. So whatever the forecast ever judged is remembered and answers all limits that it
keeps, and what a person would try (a preset, the first so many of equal blocks) is judged before anything else: no
answer is worse than that.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from explorer.plan.memory.ledger import Bytes
from explorer.plan.planners.columns import Columns, Row, Values
from explorer.plan.planners.highs import MIB, TOLERANCE, Minimum, Question, minimised
from explorer.plan.planners.pieces import Pieces
from explorer.plan.planners.reruns import Rerun

MOST_ROUNDS = 80
MOST_NEW_ROWS = 6
N_ROUNDED = 12
N_DROPPED = 40
N_DEEPENED = 4
N_DEEPER = 12
LEAST_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an answer must keep. With a budget the cost is made as small as can be, without one the peak is."""

    budget_bytes: int | None = None
    most_cost: float | None = None
    seconds: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Candidates chosen, and what no other choice can be below."""

    chosen: tuple[int, ...]
    value: float
    """What the objective comes to: cost, or bytes of the peak."""
    bound: float
    n_rows: int
    n_solves: int

    @property
    def gap(self) -> float:
        return max(0.0, (self.value - self.bound) / self.value) if self.value else 0.0


@dataclass(slots=True, kw_only=True)
class Program:
    """What all plans of one measured step have in common."""

    line: Bytes
    pieces: Pieces
    reruns: tuple[Rerun, ...]
    columns: Columns
    peak_of: Callable[[tuple[int, ...]], int]
    """The exact forecast's word on a choice."""
    suggested: tuple[tuple[int, ...], ...] = ()
    """Choices that no answer may be worse than."""
    _stretches: NDArray[np.intp] | None = None
    _tried: list[tuple[int, ...]] = field(default_factory=list)
    _judged: dict[tuple[int, ...], int] = field(default_factory=dict)
    _binding: dict[object, Row] = field(default_factory=dict)
    """Moments that bound the last answer in fractions: most of them bind the next one as well."""

    def judged(self, chosen: tuple[int, ...]) -> int:
        """Bytes of the peak of a choice."""
        if chosen not in self._judged:
            self._judged[chosen] = self.peak_of(chosen)
        return self._judged[chosen]

    def known(self) -> list[tuple[int, ...]]:
        """What was judged for any limits, and what a person would try: the cheapest first, the smallest of those."""
        if not self._tried:
            self._tried = [(), *self.suggested, *self.columns.first_of_kinds()]
        return sorted(
            {*self._tried, *self._judged}, key=lambda chosen: (self.columns.cost(chosen), len(chosen), chosen)
        )

    def solve(self, limits: Limits) -> Solution | None:
        """None: no choice keeps the limits."""
        ends = time.monotonic() + limits.seconds
        search = _Search(program=self, limits=limits, ends=ends, moments=dict(self._binding))
        answer = search.relaxed()
        if answer is None:
            return None
        self._binding = dict(search.moments)
        for chosen in self.known():
            search.judge(chosen)
        search.round(answer)
        for _ in range(MOST_ROUNDS):
            answer = search.ask(whole=True)
            if answer is not None:
                search.judge(self.columns.chosen(answer.x))
            if answer is None or search.done or time.monotonic() > ends:
                break
            if not search.separate(answer):
                search.refuse(answer)
        if not search.done:
            search.drop()
        search.deepen()
        return search.solution

    def lowest_bytes(self) -> int:
        """No policy has a lower peak; how low one can really be is a longer question."""
        search = _Search(program=self, limits=Limits(), ends=time.monotonic() + LEAST_SECONDS)
        answer = search.relaxed()
        self._binding = dict(search.moments)
        return 0 if answer is None else int(answer.bound)

    def over(self, x: Values, limit: float) -> list[tuple[object, Callable[[], Row]]]:
        """The moments at which `x` holds more than `limit`, the worst of each stretch, worst first; and their rows."""
        line = self.pieces.line(self.line, self.columns.old(x))
        if self._stretches is None:
            borders = {0, *(rerun.tick + 1 for rerun in self.reruns if rerun.tick + 1 < len(line))}
            self._stretches = np.array(sorted(borders), dtype=np.intp)
        exceeding: list[tuple[float, object, Callable[[], Row]]] = []
        most = np.maximum.reduceat(line, self._stretches)
        for place in np.flatnonzero(most > limit + 0.5).tolist():
            first = int(self._stretches[place])
            tick = first + int(line[first : first + self._length(place)].argmax())
            exceeding.append((float(most[place]), tick, partial(self._held_at, tick)))
        taken = self.columns.taken(x)
        for number, rerun in enumerate(self.reruns):
            if taken[rerun.unit] < 1e-6:
                continue
            for part, (excess, row) in enumerate(rerun.worst(x, self.columns)):
                held = line[rerun.tick] + excess
                if held > limit + 0.5:
                    key = (number, part, tuple(row.items()))
                    exceeding.append((held, key, partial(self._held_at, rerun.tick, row)))
        exceeding.sort(key=lambda one: -one[0])
        return [(key, row_of) for _, key, row_of in exceeding]

    def _length(self, place: int) -> int:
        assert self._stretches is not None
        following = self._stretches[place + 1] if place + 1 < len(self._stretches) else len(self.line)
        return int(following - self._stretches[place])

    def _held_at(self, tick: int, more: dict[int, float] | None = None) -> Row:
        row = self.columns.bytes_of(self.pieces.at(tick))
        for column, n in (more or {}).items():
            row[column] = row.get(column, 0.0) + n
        return row, -float(self.line[tick])


@dataclass(slots=True, kw_only=True)
class _Search:
    """One question on its way: how many of each class, then, if that is no answer, which."""

    program: Program
    limits: Limits
    ends: float
    best: tuple[int, ...] | None = None
    value: float = math.inf
    """What the objective comes to for the best choice so far."""
    bound: float = 0.0
    n_solves: int = 0
    moments: dict[object, Row] = field(default_factory=dict)
    """Bytes held at each moment found so far: coefficients by column, and less than 0 the bytes held without any."""
    forbidden: list[Row] = field(default_factory=list)
    apart: bool = False
    """Whether units of a class are no longer counted together."""

    def ask(self, *, whole: bool) -> Minimum | None:
        """One call of the solver."""
        self.n_solves += 1
        question = Question(
            rows=[*self._rows(), *self.forbidden],
            for_peak=self.limits.budget_bytes is None,
            most_cost=self.limits.most_cost,
            whole=whole,
            apart=self.apart,
            seconds=max(LEAST_SECONDS, self.ends - time.monotonic()),
            bound=self.bound,
        )
        answer = minimised(self.program.columns, question)
        if answer is not None:
            self.bound = max(self.bound, answer.bound)
        return answer

    def _rows(self) -> list[Row]:
        """The known moments in MiB: below the budget, or below the peak, which is a column of its own."""
        budget = self.limits.budget_bytes
        peak = {self.program.columns.peak_column: -1.0} if budget is None else {}
        return [
            ({**{column: n / MIB for column, n in row.items()}, **peak}, (most + (budget or 0)) / MIB)
            for row, most in self.moments.values()
        ]

    def separate(self, answer: Minimum) -> int:
        """Adds moments at which an answer holds too much; how many are new."""
        limit = answer.peak_bytes if self.limits.budget_bytes is None else self.limits.budget_bytes
        over = self.program.over(answer.x, limit)
        new = [(key, row_of) for key, row_of in over if key not in self.moments][:MOST_NEW_ROWS]
        self.moments.update((key, row_of()) for key, row_of in new)
        return len(new)

    def relaxed(self) -> Minimum | None:
        """The answer in fractions, with all the moments that it takes; None: there is not even that."""
        while (answer := self.ask(whole=False)) is not None:
            if not self.separate(answer) or time.monotonic() > self.ends:
                break
        if answer is not None:
            self._forget(answer)
        return answer

    def _forget(self, answer: Minimum) -> None:
        """Moments that do not bind tell apart what is equal otherwise; those that are missed come back."""
        bind = answer.slack[: len(self.moments)] < 1e-6
        self.moments = {key: row for (key, row), binds in zip(self.moments.items(), bind) if binds}

    def round(self, answer: Minimum) -> None:
        """A first answer, in case time ends before a better one: more and more of what the relaxed one takes."""
        columns = self.program.columns
        chosen = columns.legal(np.argsort(-columns.taken(answer.x), kind="stable").tolist())
        for n in sorted({0, *np.linspace(0, len(chosen), N_ROUNDED + 1).astype(int).tolist()}):
            self.judge(tuple(sorted(chosen[:n])))
        self.drop()

    def drop(self) -> None:
        """The best choice with one of its units less, the dearest first."""
        dearest = sorted(self.best or (), key=lambda i: -self.program.columns.costs[i])
        for i in dearest[:N_DROPPED]:
            self.judge(tuple(one for one in self.best or () if one != i))

    def deepen(self) -> None:
        """Tries a third level, which no column has, in the best choices and in those that barely miss the budget."""
        program, budget, cost_of = self.program, self.limits.budget_bytes, self.program.columns.cost
        cheaper = ((peak, one) for one, peak in program._judged.items() if budget is None or cost_of(one) < self.value)
        starts = [one for _, one in heapq.nsmallest(N_DEEPENED, cheaper)]
        tries = (tuple(sorted((*one, *more))) for one in starts for more in program.columns.third_levels(one))
        tries = (one for one in tries if budget is None or cost_of(one) < self.value)
        for chosen in itertools.islice(tries, N_DEEPER):
            program.judged(chosen)
            self.judge(chosen)

    def judge(self, chosen: tuple[int, ...]) -> None:
        """The exact forecast's word on a choice that may be better than what there was."""
        limits, budget = self.limits, self.limits.budget_bytes
        cost = self.program.columns.cost(chosen)
        if limits.most_cost is not None and cost > limits.most_cost * (1 + 1e-9):
            return
        if budget is not None and cost >= self.value:
            return
        # The bound rules out two levels alone; a choice of three was judged already.
        if budget is not None and cost < self.bound * (1 - 1e-6) and chosen not in self.program._judged:
            return
        peak = self.program.judged(chosen)
        value = cost if budget is not None else float(peak)
        if value < self.value and (budget is None or peak <= budget):
            self.best, self.value = chosen, value

    @property
    def solution(self) -> Solution | None:
        """The best so far, and what is known by now."""
        if self.best is None:
            return None
        bound = min(self.bound, self.value)
        return Solution(
            chosen=self.best, value=self.value, bound=bound, n_rows=len(self.moments), n_solves=self.n_solves
        )

    @property
    def done(self) -> bool:
        """Whether the best is as good as proven; bytes are whole."""
        best = self.solution
        return best is not None and (
            best.gap <= TOLERANCE or self.limits.budget_bytes is None and best.value - best.bound < 2
        )

    def refuse(self, answer: Minimum) -> None:
        """The rows have no more to say: units are chosen one by one, and what the forecast refused is forbidden."""
        if self.apart:
            self.forbidden.append(self.program.columns.all_but(self.program.columns.chosen(answer.x)))
        self.apart = True
