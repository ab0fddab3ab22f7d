"""The integer program of a plan, solved with as few moments of the step as possible (row generation).

All moments would be thousands of rows, of which about a dozen bind. The search solves with the known moments and
computes the line of the solution. Moments at which the line exceeds the budget become rows, and the program is solved
again. Every row holds for every policy within the budget, so each solution gives a valid lower bound. The first
solution that the exact forecast confirms is optimal. A solution that the forecast rejects is excluded by a row.

Units that the moments do not distinguish are counted (solver.py): hundreds of equal blocks become a few integers.
Fewer moments distinguish fewer units, so the search keeps only moments that bind in the relaxed program.

Time may end before the solver does. So every judged choice is stored and reused for other limits. Presets and other
suggested choices are judged first: no solution is worse than these.
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
from explorer.plan.planners.candidates import Candidates
from explorer.plan.planners.linear_memory import LinearTimeline, Rerun, Row
from explorer.plan.planners.solver import MIB, TOLERANCE, Minimum, Question, minimised
from explorer.plan.planners.variables import Values, Variables
from explorer.plan.predict.forecaster import Forecaster

MOST_ROUNDS = 80
MOST_NEW_ROWS = 6
N_ROUNDED = 12
N_DROPPED = 40
N_DEEPENED = 4
N_DEEPER = 12
LEAST_SECONDS = 0.1
RELAXED_SECONDS = 30.0
"""A relaxed program takes milliseconds. Without its solution nothing is known, not even whether there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a solution. With a budget the cost is minimised, without a budget the peak is."""

    budget_bytes: int | None = None
    most_cost: float | None = None
    seconds: float = 3.0
    rival: float = math.inf
    """Value that another program reaches: a search whose bound is as high ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The chosen candidates, and a lower bound for all choices."""

    chosen: tuple[int, ...]
    value: float
    """Value of the objective: cost, or bytes of the peak."""
    bound: float
    n_rows: int
    n_solves: int

    @property
    def gap(self) -> float:
        return max(0.0, (self.value - self.bound) / self.value) if self.value else 0.0


@dataclass(slots=True, kw_only=True)
class ForecastChoices:
    """A program's choices, each forecast once; a choice is the numbers of its candidates."""

    forecaster: Forecaster
    candidates: Candidates
    line: Bytes
    """Bytes at every tick with everything kept."""
    suggested: tuple[tuple[int, ...], ...] = ()
    """Choices that no solution may be worse than."""
    bound: float = 0.0
    """Lower bound that the last solution proved; infinite if no choice is within its limits."""
    _peaks: dict[tuple[int, ...], int] = field(default_factory=dict)

    def peak(self, chosen: tuple[int, ...]) -> int:
        """Peak bytes of a choice by the exact forecast."""
        if chosen not in self._peaks:
            peak = self.forecaster.peak_bytes(self.candidates.policy(chosen))
            assert peak is not None, "every candidate can be forecast"
            self._peaks[chosen] = peak
        return self._peaks[chosen]

    def without_solver(self, most_cost: float | None) -> Solution:
        """The lowest peak of the presets and of keeping everything, within the cost limit; nothing is proven of it."""
        cost = self.candidates.cost
        within = [chosen for chosen in self.suggested if most_cost is None or cost(chosen) <= most_cost]
        chosen = min([(), *within], key=self.peak)
        return Solution(chosen=chosen, value=self.peak(chosen), bound=0.0, n_rows=0, n_solves=0)


@dataclass(slots=True, kw_only=True)
class Program(ForecastChoices):
    """The integer program of a measured step, shared by all its plans."""

    timeline: LinearTimeline
    reruns: tuple[Rerun, ...]
    variables: Variables
    _stretches: NDArray[np.intp] | None = None
    _binding: dict[object, Row] = field(default_factory=dict)
    """Rows that bound the last relaxed solution. Most of the rows bind the next relaxed solution too."""

    def solve(self, limits: Limits) -> Solution | None:
        """The best choice within `limits`; None if there is none."""
        ends = time.monotonic() + limits.seconds
        search = _Search(program=self, limits=limits, ends=ends, moments=dict(self._binding))
        answer = search.relaxed()
        self.bound = math.inf if answer is None else search.bound
        if answer is None:
            return None
        self._binding = dict(search.moments)
        tried = {(), *self.suggested, *self._peaks}
        for chosen in sorted(tried, key=lambda chosen: (self.candidates.cost(chosen), len(chosen), chosen)):
            search.judge(chosen)
        search.judge_prefixes(answer)
        for _ in range(MOST_ROUNDS):
            answer = search.minimise(whole=True)
            if answer is not None:
                search.judge(self.variables.chosen(answer.x))
            if answer is None or search.done or time.monotonic() > ends:
                break
            if not search.add_moments(answer):
                search.forbid(answer)
        if not search.done:
            search.judge_without_each()
        search.judge_third_levels()
        proven_none = search.best is None and answer is None and time.monotonic() < ends
        self.bound = math.inf if proven_none else search.bound
        return search.solution

    def lowest_bytes(self) -> int:
        """Lower bound of the peak bytes of all policies, from the relaxed program alone."""
        search = _Search(program=self, limits=Limits(), ends=time.monotonic() + LEAST_SECONDS)
        answer = search.relaxed()
        self._binding = dict(search.moments)
        return 0 if answer is None else int(answer.bound)

    def over(self, x: Values, limit: float) -> list[tuple[object, Callable[[], Row]]]:
        """Keys and rows of the moments at which `x` holds more than `limit`: the worst of each stretch, worst first."""
        line = self.timeline.line(self.line, self.variables.factors(x))
        if self._stretches is None:
            borders = {0, *(rerun.tick + 1 for rerun in self.reruns if rerun.tick + 1 < len(line))}
            self._stretches = np.array(sorted(borders), dtype=np.intp)
        exceeding: list[tuple[float, object, Callable[[], Row]]] = []
        most, ends = np.maximum.reduceat(line, self._stretches), np.append(self._stretches[1:], len(line))
        for place in np.flatnonzero(most > limit + 0.5).tolist():
            first, end = int(self._stretches[place]), int(ends[place])
            tick = first + int(line[first:end].argmax())
            exceeding.append((float(most[place]), tick, partial(self._held_at, tick)))
        shares = self.variables.share_of_units(x)
        for number, rerun in enumerate(self.reruns):
            if shares[rerun.unit] < 1e-6:
                continue
            for part, (excess, row) in enumerate(self._worst_moments(rerun, x)):
                held = line[rerun.tick] + excess
                if held > limit + 0.5:
                    key = (number, part, tuple(row.items()))
                    exceeding.append((held, key, partial(self._held_at, rerun.tick, row)))
        exceeding.sort(key=lambda moment: -moment[0])
        return [(key, row_of) for _, key, row_of in exceeding]

    def _worst_moments(self, rerun: Rerun, x: Values) -> list[tuple[float, dict[int, float]]]:
        """Excess and row of the moment of a rerun that holds most under `x`, alone and with each unit around."""
        number, alone = self.variables.number, self.variables.of_unit[rerun.unit]
        held = rerun.alive * x[alone].sum()
        for unit, more in rerun.inside.items():
            held = held + more * x[number[unit, rerun.unit]]
        at = int(held.argmax())
        row = dict.fromkeys(alone, float(rerun.alive[at]))
        row |= {number[unit, rerun.unit]: float(more[at]) for unit, more in rerun.inside.items()}
        moments = [(float(held[at]), row)]
        for holder, n_bytes, others in rerun.restored:
            restored = {number[rerun.unit, holder]: float(n_bytes)}
            restored |= {number[unit, holder]: -float(less) for unit, less in others.items()}
            excess = held[at] + sum(n * x[variable] for variable, n in restored.items())
            both = {i: row.get(i, 0.0) + restored.get(i, 0.0) for i in {**row, **restored}}
            moments.append((float(excess), both))
        return moments

    def _held_at(self, tick: int, more: dict[int, float] | None = None) -> Row:
        row = self.variables.bytes_of(self.timeline.at(tick))
        for variable, n in (more or {}).items():
            row[variable] = row.get(variable, 0.0) + n
        return row, -float(self.line[tick])


@dataclass(slots=True, kw_only=True)
class _Search:
    """The search for one solution: first counts of each class, then single units if the counts give no solution."""

    program: Program
    limits: Limits
    ends: float
    best: tuple[int, ...] | None = None
    value: float = math.inf
    """Value of the objective for the best choice so far."""
    bound: float = 0.0
    n_solves: int = 0
    moments: dict[object, Row] = field(default_factory=dict)
    """Row of each moment so far: bytes by variable, and minus the bytes held if everything is kept."""
    forbidden: list[Row] = field(default_factory=list)
    single_units: bool = False
    """True if single units are chosen, no longer counts of classes."""

    def minimise(self, *, whole: bool) -> Minimum | None:
        """One call of the solver."""
        self.n_solves += 1
        question = Question(
            rows=[*self._rows(), *self.forbidden],
            for_peak=self.limits.budget_bytes is None,
            most_cost=self.limits.most_cost,
            whole=whole,
            single_units=self.single_units,
            seconds=max(LEAST_SECONDS, self.ends - time.monotonic()) if whole else RELAXED_SECONDS,
            bound=self.bound,
        )
        answer = minimised(self.program.variables, question)
        if answer is not None:
            self.bound = max(self.bound, answer.bound)
        return answer

    def _rows(self) -> list[Row]:
        """The known moments in MiB: at most the budget, or at most the variable of the peak."""
        budget = self.limits.budget_bytes
        rows = []
        for row, most in self.moments.values():
            shares = {variable: n / MIB for variable, n in row.items()}
            if budget is None:
                shares[self.program.variables.peak] = -1.0
            rows.append((shares, (most + (budget or 0)) / MIB))
        return rows

    def add_moments(self, answer: Minimum) -> int:
        """Adds the moments at which an answer exceeds the limit. Returns the number of new moments."""
        limit = answer.peak_bytes if self.limits.budget_bytes is None else self.limits.budget_bytes
        over = self.program.over(answer.x, limit)
        new = [(key, row_of) for key, row_of in over if key not in self.moments][:MOST_NEW_ROWS]
        self.moments.update((key, row_of()) for key, row_of in new)
        return len(new)

    def relaxed(self) -> Minimum | None:
        """The solution of the relaxed program with all moments that it needs; None if there is none."""
        while (answer := self.minimise(whole=False)) is not None:
            if not self.add_moments(answer) or time.monotonic() > self.ends:
                break
        if answer is not None:  # Moments that do not bind split classes. A moment that is needed is added again.
            bind = answer.slack[: len(self.moments)] < 1e-6
            self.moments = {key: row for (key, row), binds in zip(self.moments.items(), bind) if binds}
        return answer

    def judge_prefixes(self, answer: Minimum) -> None:
        """Judges first solutions: growing prefixes of the units of the relaxed solution, largest fraction first."""
        variables = self.program.variables
        chosen = variables.legal(np.argsort(-variables.share_of_units(answer.x), kind="stable").tolist())
        for n in sorted({0, *np.linspace(0, len(chosen), N_ROUNDED + 1).astype(int).tolist()}):
            self.judge(tuple(sorted(chosen[:n])))
        self.judge_without_each()

    def judge_without_each(self) -> None:
        """Judges the best choice without one of its units, most expensive unit first."""
        dearest = sorted(self.best or (), key=lambda i: -self.program.variables.costs[i])
        for i in dearest[:N_DROPPED]:
            self.judge(tuple(unit for unit in self.best or () if unit != i))

    def judge_third_levels(self) -> None:
        """Tries a third level of nesting, which has no variable, in the best choices and in near misses."""
        program, budget, cost_of = self.program, self.limits.budget_bytes, self.program.candidates.cost

        def is_cheaper(chosen: tuple[int, ...]) -> bool:
            return budget is None or cost_of(chosen) < self.value

        lowest = heapq.nsmallest(
            N_DEEPENED, ((peak, chosen) for chosen, peak in program._peaks.items() if is_cheaper(chosen))
        )
        nested = (
            tuple(sorted((*chosen, *more))) for _, chosen in lowest for more in program.variables.third_levels(chosen)
        )
        for chosen in itertools.islice(filter(is_cheaper, nested), N_DEEPER):
            program.peak(chosen)
            self.judge(chosen)

    def judge(self, chosen: tuple[int, ...]) -> None:
        """Forecasts a choice that may be better than the best so far, and keeps the better choice."""
        limits, budget = self.limits, self.limits.budget_bytes
        cost = self.program.candidates.cost(chosen)
        if limits.most_cost is not None and cost > limits.most_cost * (1 + 1e-9):
            return
        if budget is not None and cost >= self.value:
            return
        # The bound holds for two levels of nesting only; a choice with three levels was judged before.
        if budget is not None and cost < self.bound * (1 - 1e-6) and chosen not in self.program._peaks:
            return
        peak = self.program.peak(chosen)
        value = cost if budget is not None else float(peak)
        if value < self.value and (budget is None or peak <= budget):
            self.best, self.value = chosen, value

    @property
    def solution(self) -> Solution | None:
        """The best choice so far and the lower bound so far."""
        if self.best is None:
            return None
        bound = min(self.bound, self.value)
        return Solution(
            chosen=self.best, value=self.value, bound=bound, n_rows=len(self.moments), n_solves=self.n_solves
        )

    @property
    def done(self) -> bool:
        """True if the gap is within TOLERANCE, or below two bytes for a peak, or nothing better can be found."""
        if self.bound >= self.limits.rival * (1 - TOLERANCE):
            return True
        best = self.solution
        return best is not None and (
            best.gap <= TOLERANCE or self.limits.budget_bytes is None and best.value - best.bound < 2
        )

    def forbid(self, answer: Minimum) -> None:
        """Switches to single units when no moment is left to add; after the switch, forbids the rejected choice."""
        if self.single_units:
            self.forbidden.append(self.program.variables.all_but(self.program.variables.chosen(answer.x)))
        self.single_units = True
