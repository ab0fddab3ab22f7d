"""The columns of the integer program: a candidate is recomputed alone, or inside another recomputed candidate.

    x[u]      u is recomputed, and no unit around u is
    x[u | o]  u is recomputed inside o, and o is recomputed too; there is no third level

A place is a block that contains no other candidate. On the path from the root to a place at most one unit is
recomputed alone, and at most one unit inside that unit:

    sum of x[u] over all u around the place  <=  1          sum of x[u | o]  <=  x[o]

These rows describe every policy. Without a budget the corners of their polytope are integers. Two units on one path
may change the same bytes: column x[u | o] carries the difference. Bytes that units on several paths share (a skip)
keep a separate column, held by the rows of its bonds (pieces.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorer.plan.names import innermost, is_within, lineage
from explorer.plan.planners.candidates import Candidates
from explorer.plan.planners.keeping import is_kept_apart
from explorer.plan.planners.pieces import Bond, Pieces

Row = tuple[dict[int, float], float]
"""Coefficients by column, and the upper bound of their sum."""
Values = NDArray[np.float64]
DEPTH = 2
LEAST_KIN = 4
N_FIRST = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRow:
    """One row of a place: the sum of `columns` is at most 1, or at most the value of column `holder`."""

    place: int
    holder: int | None
    columns: tuple[int, ...]
    innermost: int | None
    """The column of the unit that is the place itself."""


class Columns:
    """Columns and rows that do not depend on the budget. Units are numbered as in `candidates.units`."""

    def __init__(self, candidates: Candidates, pieces: Pieces) -> None:
        self._candidates = candidates
        self._kept_apart = [is_kept_apart(one.unit) for one in candidates.units]
        self.n_units = len(candidates.units)
        self.ways: list[tuple[int, int | None]] = [(i, None) for i in range(self.n_units)]
        self.ways += [(i, o) for i, above in enumerate(candidates.around) for o in above]
        """(Unit, unit around it or None) of each column before the shared ones."""
        self.number = {way: column for column, way in enumerate(self.ways)}
        self.of_unit: list[list[int]] = [[] for _ in range(self.n_units)]
        for column, (i, _) in enumerate(self.ways):
            self.of_unit[i].append(column)
        self._bonds = _by_column(pieces.bonds)
        self.shared = [column for column, bonds in self._bonds.items() if not self._on_one_way(bonds)]
        """Columns of pieces.py that depend on units on several paths. Here they come after the columns of the units."""
        self.peak_column = len(self.ways) + len(self.shared)
        self.n_columns = self.peak_column + 1
        self.unit_cost = candidates.step_cost or 1.0
        self.costs = np.zeros(self.n_columns)
        for column, (i, o) in enumerate(self.ways):
            spared = 0.0 if o is None else candidates.spared.get((i, o), 0.0)
            self.costs[column] = candidates.units[i].cost - spared
        self._n_old = pieces.n_columns
        self._new, self._old, self._effect = self._effects()
        self.paths = self._paths()
        self.along: list[list[int]] = [[] for _ in self.ways]
        """The paths that contain the column."""
        self.below: list[list[int]] = [[] for _ in self.ways]
        """The paths whose holder is the column, a unit that is recomputed alone."""
        for number, path in enumerate(self.paths):
            for column in path.columns:
                self.along[column].append(number)
            if path.holder is not None:
                self.below[path.holder].append(number)
        self.inside_out = sorted(range(self.n_units), key=lambda i: -len(candidates.around[i]))

    def chosen(self, x: Values) -> tuple[int, ...]:
        """Numbers of the candidates that `x` recomputes."""
        return tuple(np.flatnonzero(self.taken(x) > 0.5).tolist())

    def taken(self, x: Values) -> Values:
        """The fraction of each unit that `x` recomputes, alone or inside another unit."""
        units = [i for i, _ in self.ways]
        return np.bincount(units, x[: len(units)], self.n_units).astype(np.float64)

    def cost(self, chosen: tuple[int, ...]) -> float:
        """The cost of recomputing the candidates `chosen`, in `cost_unit` of the candidates."""
        return self._candidates.cost(chosen)

    def bytes_of(self, old: Values) -> dict[int, float]:
        """Bytes by column, from bytes by column of pieces.py (`old`)."""
        row = np.bincount(self._new, self._effect * old[self._old], self.n_columns)
        return {int(column): float(row[column]) for column in np.flatnonzero(row)}

    def old(self, x: Values) -> Values:
        """`x` over columns of pieces.py. Shared columns take the value with the fewest bytes that their bonds allow."""
        x = x.copy()
        taken = dict(enumerate(self.taken(x).tolist()))
        for column, old in enumerate(self.shared, start=len(self.ways)):
            x[column] = _tight(self._bonds[old], old, taken)
        return np.bincount(self._old, self._effect * x[self._new], self._n_old).astype(np.float64)

    def legal(self, order: Sequence[int]) -> list[int]:
        """Candidates of `order`, taken greedily from the front, that together are a valid policy."""
        units, around = self._candidates.units, self._candidates.around
        taken: list[int] = []
        named: set[str] = set()
        over: set[str] = set()
        closed: set[str] = set()
        depth: Counter[int] = Counter()
        above: set[int] = set()
        for i in order:
            blocks, apart = units[i].unit.blocks, self._kept_apart[i]
            lines = {name for fqn in blocks for name in lineage(fqn)}
            if not named.isdisjoint(blocks) or not closed.isdisjoint(lines):
                continue
            if apart and not (named.isdisjoint(lines) and over.isdisjoint(blocks)):
                continue
            holders = [j for j in around[i] if j in taken]
            if len(holders) >= DEPTH or (holders and i in above):
                continue
            if i in above and any(depth[j] >= 1 for j in taken if i in around[j]):
                continue
            taken.append(i)
            named.update(blocks)
            over.update(lines)
            closed.update(blocks if apart else ())
            above.update(around[i])
            depth[i] = len(holders)
        return taken

    def third_levels(self, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Additions that nest `chosen` three levels deep: first all units of a kind at once, then each unit alone."""
        units, around = self._candidates.units, self._candidates.around
        named = {fqn for i in chosen for fqn in units[i].unit.blocks}
        pairs = [(j, o) for j in chosen for o in around[j] if o in chosen]
        kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for i, one in enumerate(units):
            inside, outside = set(around[i]), any(i in around[o] for _, o in pairs)
            deeper = outside or any(j in inside and o in inside for j, o in pairs)
            if deeper and not self._kept_apart[i] and named.isdisjoint(one.unit.blocks):
                kinds[one.kin].append(i)
        yield from (tuple(kind) for kind in kinds.values() if len(kind) > 1)
        yield from ((i,) for kind in kinds.values() for i in kind)

    def first_of_kinds(self) -> list[tuple[int, ...]]:
        """For each kind of candidate, its first n members, for at most N_FIRST values of n.

        The first members are recomputed because backward reaches them last.
        """
        kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for i, one in enumerate(self._candidates.units):
            kinds[one.kin].append(i)
        choices = []
        for kind in kinds.values():
            if len(kind) >= LEAST_KIN:
                members = self.legal(kind)  # equal segments overlap
                counts = np.linspace(1, len(members), min(N_FIRST, len(members))).astype(int).tolist()
                choices += [tuple(members[:n]) for n in counts]
        return choices

    def all_but(self, chosen: Iterable[int]) -> Row:
        """A row that forbids `chosen` and no other choice."""
        named = set(chosen)
        row = {column: 1.0 if i in named else -1.0 for column, (i, _) in enumerate(self.ways)}
        return row, len(named) - 1.0

    def bond_rows(self) -> list[Row]:
        """The bonds of the shared columns as rows over all columns."""
        number = {old: column for column, old in enumerate(self.shared, start=len(self.ways))}
        rows = []
        for old in self.shared:
            for bond, most in self._bonds[old]:
                row = {number[old]: bond[old]}
                row |= {column: n for i, n in bond.items() if i != old for column in self.of_unit[i]}
                rows.append((row, most))
        return rows

    def sharing(self) -> set[int]:
        """Units whose recompute changes the value of a shared column."""
        return {i for old in self.shared for bond, _ in self._bonds[old] for i in bond if i != old}

    def _on_one_way(self, bonds: list[Bond]) -> bool:
        """True if any two units of `bonds` lie inside each other or exclude each other."""
        around = self._candidates.around
        named = sorted({i for bond, _ in bonds for i in bond if i < self.n_units})
        return all(
            i in around[j] or j in around[i] or self._overlap(i, j)
            for place, i in enumerate(named) for j in named[place + 1 :]
        )  # fmt: skip

    def _overlap(self, i: int, j: int) -> bool:
        """True if no policy has both units: they share a block, or are nested and one of them allows no nesting."""
        ours, theirs = (self._candidates.units[one].unit.blocks for one in (i, j))
        if self._kept_apart[i] or self._kept_apart[j]:
            return any(is_within(a, b) or is_within(b, a) for a in ours for b in theirs)
        return not set(ours).isdisjoint(theirs)

    def _effects(self) -> tuple[NDArray[np.intp], NDArray[np.intp], Values]:
        """Weight of each column of pieces.py (old) in each column (new), as sparse arrays: new, old, weight.

        Column x[u | o] carries only the difference to column x[o].
        """
        shared = set(self.shared)
        of_unit: list[list[int]] = [[] for _ in range(self.n_units)]
        for old, bonds in self._bonds.items():
            if old not in shared:
                for i in {i for bond, _ in bonds for i in bond if i != old}:
                    of_unit[i].append(old)
        effects = []
        for column, (i, o) in enumerate(self.ways):
            effects.append((column, i, 1.0))
            for old in of_unit[i]:
                alone = {} if o is None else {o: 1.0}
                n = _tight(self._bonds[old], old, {**alone, i: 1.0}) - _tight(self._bonds[old], old, alone)
                if n:
                    effects.append((column, old, n))
        effects += [(column, old, 1.0) for column, old in enumerate(self.shared, start=len(self.ways))]
        new, olds, n_s = zip(*effects) if effects else ((), (), ())
        return np.array(new, dtype=np.intp), np.array(olds, dtype=np.intp), np.array(n_s, dtype=np.float64)

    def _paths(self) -> list[PlaceRow]:
        units, around = self._candidates.units, self._candidates.around
        naming: dict[str, list[int]] = defaultdict(list)
        for i, one in enumerate(units):
            for fqn in one.unit.blocks:
                naming[fqn].append(i)
        paths = []
        for place, fqn in enumerate(innermost(naming)):
            over = [i for name in lineage(fqn) for i in naming.get(name, ())]
            itself = next((i for i in naming[fqn] if len(units[i].unit.blocks) == 1), None)
            paths.append(PlaceRow(place=place, holder=None, columns=tuple(over), innermost=itself))
            for o in over:
                inside = tuple(self.number[i, o] for i in over if o in around[i])
                if inside:
                    innermost_in = None if itself is None else self.number.get((itself, o))
                    paths.append(PlaceRow(place=place, holder=o, columns=inside, innermost=innermost_in))
        return paths


def _by_column(bonds: Iterable[Bond]) -> dict[int, list[Bond]]:
    """Bonds grouped by the column that they bound. A bond bounds its highest column: dependent columns come last."""
    by_column: dict[int, list[Bond]] = defaultdict(list)
    for bond in bonds:
        by_column[max(bond[0])].append(bond)
    return by_column


def _tight(bonds: list[Bond], column: int, taken: dict[int, float]) -> float:
    """The value of `column` of pieces.py with the fewest bytes: the largest for freed bytes, the smallest for kept."""
    frees = bonds[0][0][column] > 0
    slacks = [most - sum(n * row[i] for i, n in taken.items() if i in row) for row, most in bonds]
    return min(1.0, max(0.0, min(slacks) if frees else -min(slacks)))
