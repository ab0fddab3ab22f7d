"""The variables of the integer program: a candidate is recomputed alone, or inside another recomputed candidate.

    x[u]      u is recomputed, and no unit around u is
    x[u | o]  u is recomputed inside o, and o is recomputed too; there is no third level

A place is a block that contains no other candidate. On the path from the root to a place at most one unit is
recomputed alone, and at most one unit inside that unit:

    sum of x[u] over all u around the place  <=  1          sum of x[u | o]  <=  x[o]

These rows describe every policy. Without a budget the corners of their polytope are integers. Two units on one path
may change the same bytes: variable x[u | o] carries the difference. Bytes that units on several paths share (a skip)
have a separate variable, held by the bounds of its factor (linear_memory.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from explorer.plan.names import innermost, lineage
from explorer.plan.planners.candidates import Candidates, excludes_nesting
from explorer.plan.planners.linear_memory import LinearTimeline, Row
from explorer.record.base import Record

Values = NDArray[np.float64]
DEPTH = 2


class PlaceRow(Record):
    """One row of a place: the sum of `variables` is at most 1, or at most the value of variable `holder`."""

    place: int
    holder: int | None
    variables: tuple[int, ...]
    innermost: int | None
    """The variable of the unit that is the place itself."""

    @property
    def row(self) -> Row:
        """The row over variables."""
        row = dict.fromkeys(self.variables, 1.0)
        return (row, 1.0) if self.holder is None else ({**row, self.holder: -1.0}, 0.0)


class Variables:
    """Variables and rows that do not depend on the budget. Units are numbered as in `candidates.units`."""

    def __init__(self, candidates: Candidates, timeline: LinearTimeline) -> None:
        self._candidates = candidates
        self._alone = [excludes_nesting(candidate.unit) for candidate in candidates.units]
        self.n_units = len(candidates.units)
        self.of_choice: list[tuple[int, int | None]] = [(i, None) for i in range(self.n_units)]
        self.of_choice += [(i, o) for i, above in enumerate(candidates.around) for o in above]
        """(Unit, unit around it or None) of each variable before the shared ones."""
        self.number = {choice: variable for variable, choice in enumerate(self.of_choice)}
        self.of_unit: list[list[int]] = [[] for _ in range(self.n_units)]
        for variable, (i, _) in enumerate(self.of_choice):
            self.of_unit[i].append(variable)
        self._bounds: dict[int, list[Row]] = defaultdict(list)
        for bound in timeline.bounds:
            self._bounds[max(bound[0])].append(bound)  # auxiliary factors come last
        self.shared = [factor for factor, bounds in self._bounds.items() if not self._on_one_path(bounds)]
        """Factors that depend on units on several paths. Their variables come after the variables of the units."""
        self.peak = len(self.of_choice) + len(self.shared)
        """The variable of the peak, in MiB."""
        self.n_variables = self.peak + 1
        self.unit_cost = candidates.step_cost or 1.0
        self.costs = np.zeros(self.n_variables)
        for variable, (i, o) in enumerate(self.of_choice):
            spared = 0.0 if o is None else candidates.spared.get((i, o), 0.0)
            self.costs[variable] = candidates.units[i].cost - spared
        self._n_factors = timeline.n_factors
        self._variable, self._factor, self._weight = self._weights_of_factors()
        self.paths = self._paths()
        self.along: list[list[int]] = [[] for _ in self.of_choice]
        """The paths that contain the variable."""
        self.below: list[list[int]] = [[] for _ in self.of_choice]
        """The paths whose holder is the variable of a unit that is recomputed alone."""
        for number, path in enumerate(self.paths):
            for variable in path.variables:
                self.along[variable].append(number)
            if path.holder is not None:
                self.below[path.holder].append(number)
        self.inside_out = sorted(range(self.n_units), key=lambda i: -len(candidates.around[i]))
        """Numbers of the units, innermost first."""

    def chosen(self, x: Values) -> tuple[int, ...]:
        """Numbers of the candidates that `x` recomputes."""
        return tuple(np.flatnonzero(self.share_of_units(x) > 0.5).tolist())

    def share_of_units(self, x: Values) -> Values:
        """The fraction of each unit that `x` recomputes, alone or inside another unit."""
        units = [i for i, _ in self.of_choice]
        return np.bincount(units, x[: len(units)], self.n_units).astype(np.float64)

    def bytes_of(self, factors: Values) -> dict[int, float]:
        """Bytes by variable, from bytes by factor."""
        row = np.bincount(self._variable, self._weight * factors[self._factor], self.n_variables)
        return {int(variable): float(row[variable]) for variable in np.flatnonzero(row)}

    def factors(self, x: Values) -> Values:
        """Values of the factors. Shared factors take the value with the fewest bytes that their bounds allow."""
        x = self.with_shared(x)
        return np.bincount(self._factor, self._weight * x[self._variable], self._n_factors).astype(np.float64)

    def with_shared(self, x: Values) -> Values:
        """`x` with the variables of shared factors at the value with the fewest bytes."""
        x = x.copy()
        shares = dict(enumerate(self.share_of_units(x).tolist()))
        for variable, factor in enumerate(self.shared, start=len(self.of_choice)):
            x[variable] = _with_fewest_bytes(self._bounds[factor], factor, shares)
        return x

    def legal(self, order: Sequence[int]) -> list[int]:
        """Candidates of `order`, taken greedily from the front, that together are a valid policy."""
        units, around = self._candidates.units, self._candidates.around
        chosen: list[int] = []
        named: set[str] = set()
        over: set[str] = set()
        closed: set[str] = set()
        over_closed: set[str] = set()
        above: set[int] = set()
        for i in order:
            blocks, alone = units[i].unit.blocks, self._alone[i]
            lines = set(lineage(*blocks))
            if not (named | over_closed).isdisjoint(blocks) or not closed.isdisjoint(lines):
                continue
            if alone and not (named.isdisjoint(lines) and over.isdisjoint(blocks)):
                continue
            holders = [j for j in around[i] if j in chosen]
            if len(holders) >= DEPTH or (holders and i in above):
                continue
            if i in above and any(o in chosen for j in chosen if i in around[j] for o in around[j]):
                continue
            chosen.append(i)
            named.update(blocks)
            over.update(lines)
            if alone:
                closed.update(blocks)
                over_closed.update(lines)
            above.update(around[i])
        return chosen

    def third_levels(self, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Additions that nest `chosen` three levels deep: first all units of a kind at once, then each unit alone."""
        units, around = self._candidates.units, self._candidates.around
        pairs = [(j, o) for j in chosen for o in around[j] if o in chosen]
        kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for i, candidate in enumerate(units):
            inside, outside = set(around[i]), any(i in around[o] for _, o in pairs)
            deeper = outside or any(j in inside and o in inside for j, o in pairs)
            if deeper and not self._alone[i] and not any(self._candidates.exclude(i, j) for j in chosen):
                kinds[candidate.kin].append(i)
        yield from (apart for kind in kinds.values() if len(apart := self._apart(kind)) > 1)
        yield from ((i,) for kind in kinds.values() for i in kind)

    def _apart(self, kind: Iterable[int]) -> tuple[int, ...]:
        """The first candidates of `kind` that share no block: no run accepts segments that overlap."""
        chosen: list[int] = []
        named: set[str] = set()
        for i in kind:
            blocks = self._candidates.units[i].unit.blocks
            if named.isdisjoint(blocks):
                chosen.append(i)
                named.update(blocks)
        return tuple(chosen)

    def all_but(self, chosen: Iterable[int]) -> Row:
        """A row that forbids `chosen` and no other choice."""
        named = set(chosen)
        row = {variable: 1.0 if i in named else -1.0 for variable, (i, _) in enumerate(self.of_choice)}
        return row, len(named) - 1.0

    def bound_rows(self) -> list[Row]:
        """The bounds of the shared factors as rows over all variables."""
        number = {factor: variable for variable, factor in enumerate(self.shared, start=len(self.of_choice))}
        rows = []
        for factor in self.shared:
            for bound, most in self._bounds[factor]:
                row = {number[factor]: bound[factor]}
                row |= {variable: n for i, n in bound.items() if i != factor for variable in self.of_unit[i]}
                rows.append((row, most))
        return rows

    def sharing(self) -> set[int]:
        """Units whose recompute changes the value of a shared factor."""
        return {i for factor in self.shared for bound, _ in self._bounds[factor] for i in bound if i != factor}

    def _on_one_path(self, bounds: list[Row]) -> bool:
        """True if any two units of `bounds` lie inside each other or exclude each other."""
        around = self._candidates.around
        named = sorted({i for bound, _ in bounds for i in bound if i < self.n_units})
        return all(
            i in around[j] or j in around[i] or self._candidates.exclude(i, j)
            for place, i in enumerate(named) for j in named[place + 1 :]
        )  # fmt: skip

    def _weights_of_factors(self) -> tuple[NDArray[np.intp], NDArray[np.intp], Values]:
        """Weight of each factor in each variable, as sparse arrays: variable, factor, weight.

        Variable x[u | o] carries only the difference to variable x[o].
        """
        shared = set(self.shared)
        of_unit: list[list[int]] = [[] for _ in range(self.n_units)]
        for factor, bounds in self._bounds.items():
            if factor not in shared:
                for i in {i for bound, _ in bounds for i in bound if i != factor}:
                    of_unit[i].append(factor)
        weights = []
        for variable, (i, o) in enumerate(self.of_choice):
            weights.append((variable, i, 1.0))
            outer = {} if o is None else {o: 1.0}
            for factor in of_unit[i]:
                with_unit, without = (
                    _with_fewest_bytes(self._bounds[factor], factor, shares) for shares in ({**outer, i: 1.0}, outer)
                )
                if with_unit != without:
                    weights.append((variable, factor, with_unit - without))
        weights += [(variable, factor, 1.0) for variable, factor in enumerate(self.shared, start=len(self.of_choice))]
        variables, factors, values = zip(*weights) if weights else ((), (), ())
        return np.array(variables, dtype=np.intp), np.array(factors, dtype=np.intp), np.array(values, dtype=np.float64)

    def _paths(self) -> list[PlaceRow]:
        units, around = self._candidates.units, self._candidates.around
        naming: dict[str, list[int]] = defaultdict(list)
        for i, candidate in enumerate(units):
            for fqn in candidate.unit.blocks:
                naming[fqn].append(i)
        paths = []
        for place, fqn in enumerate(innermost(naming)):
            over = [i for name in lineage(fqn) for i in naming.get(name, ())]
            itself = next((i for i in naming[fqn] if len(units[i].unit.blocks) == 1), None)
            paths.append(PlaceRow(place=place, holder=None, variables=tuple(over), innermost=itself))
            for o in over:
                inside = tuple(self.number[i, o] for i in over if o in around[i])
                if inside:
                    innermost_in = None if itself is None else self.number.get((itself, o))
                    paths.append(PlaceRow(place=place, holder=o, variables=inside, innermost=innermost_in))
        return paths


def _with_fewest_bytes(bounds: list[Row], factor: int, shares: dict[int, float]) -> float:
    """The value of `factor` with the fewest bytes: the largest of an absence, the smallest of a presence."""
    is_absence = bounds[0][0][factor] > 0
    slacks = [most - sum(n * row.get(i, 0.0) for i, n in shares.items()) for row, most in bounds]
    return min(1.0, max(0.0, min(slacks) if is_absence else -min(slacks)))
