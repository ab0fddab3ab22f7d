"""The columns of the program: every way in which a candidate may be recomputed, alone or inside another that is.

    x[u]      u is recomputed, and nothing around it is
    x[u | o]  u is recomputed inside o, which is as well; no third level inside a second

A place is a block that no other candidate lies in. On the way down to it at most one unit stands alone, and at most one
inside that:

    sum of x[u] over all u around the place  <=  1          sum of x[u | o]  <=  x[o]

That is all there is to being a policy, and without a budget these rows have whole corners. What two units on one way
down do to the same bytes is a number of column x[u | o]; only what units on several ways share (a skip) stays a column
of its own, between the rows of its bonds (pieces.py).
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
"""Coefficients by column, and what their sum may be at most."""
Values = NDArray[np.float64]
DEPTH = 2
LEAST_KIN = 4
N_FIRST = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRow:
    """One row of a place: of all columns, at most one, or as much as `holder` is."""

    place: int
    holder: int | None
    columns: tuple[int, ...]
    innermost: int | None
    """The column of the unit that is the place itself."""


class Columns:
    """Columns and rows that do not depend on what is asked. Units by number, as in the candidates."""

    def __init__(self, candidates: Candidates, pieces: Pieces) -> None:
        self._candidates = candidates
        self._kept_apart = [is_kept_apart(one.unit) for one in candidates.units]
        self.n_units = len(candidates.units)
        self.ways: list[tuple[int, int | None]] = [(i, None) for i in range(self.n_units)]
        self.ways += [(i, o) for i, above in enumerate(candidates.around) for o in above]
        """Unit, and the one that it is recomputed in, of every column but the last ones."""
        self.number = {way: column for column, way in enumerate(self.ways)}
        self.of_unit: list[list[int]] = [[] for _ in range(self.n_units)]
        for column, (i, _) in enumerate(self.ways):
            self.of_unit[i].append(column)
        self._bonds = _by_column(pieces.bonds)
        self.shared = [column for column, bonds in self._bonds.items() if not self._on_one_way(bonds)]
        """Columns of pieces.py that units on several ways down decide about; here they follow the units'."""
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
        """The paths that a column lies on."""
        self.below: list[list[int]] = [[] for _ in self.ways]
        """The paths inside a unit that stands alone."""
        for number, path in enumerate(self.paths):
            for column in path.columns:
                self.along[column].append(number)
            if path.holder is not None:
                self.below[path.holder].append(number)
        self.inside_out = sorted(range(self.n_units), key=lambda i: -len(candidates.around[i]))

    def chosen(self, x: Values) -> tuple[int, ...]:
        """The candidates that `x` recomputes."""
        return tuple(np.flatnonzero(self.taken(x) > 0.5).tolist())

    def taken(self, x: Values) -> Values:
        """How much of each unit `x` recomputes, alone or inside another."""
        units = [i for i, _ in self.ways]
        return np.bincount(units, x[: len(units)], self.n_units).astype(np.float64)

    def cost(self, chosen: tuple[int, ...]) -> float:
        """The cost of recomputing these, in the candidates' unit."""
        return self._candidates.cost(chosen)

    def bytes_of(self, old: Values) -> dict[int, float]:
        """A row over columns, made from one over those of pieces.py."""
        row = np.bincount(self._new, self._effect * old[self._old], self.n_columns)
        return {int(column): float(row[column]) for column in np.flatnonzero(row)}

    def old(self, x: Values) -> Values:
        """`x` in the columns of pieces.py, those that units share as low in bytes as their bonds let them."""
        x = x.copy()
        taken = dict(enumerate(self.taken(x).tolist()))
        for column, old in enumerate(self.shared, start=len(self.ways)):
            x[column] = _tight(self._bonds[old], old, taken)
        return np.bincount(self._old, self._effect * x[self._new], self._n_old).astype(np.float64)

    def legal(self, order: Sequence[int]) -> list[int]:
        """As many of `order`, first ones first, as make a policy."""
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
        """Units that make three levels of a choice of two: each kind of them at once, then one by one."""
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
        """Of each kind of candidate the first ones, which backward reaches last, in at most N_FIRST numbers."""
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
        """A row that forbids this choice and no other."""
        named = set(chosen)
        row = {column: 1.0 if i in named else -1.0 for column, (i, _) in enumerate(self.ways)}
        return row, len(named) - 1.0

    def bond_rows(self) -> list[Row]:
        """What holds the shared columns."""
        number = {old: column for column, old in enumerate(self.shared, start=len(self.ways))}
        rows = []
        for old in self.shared:
            for bond, most in self._bonds[old]:
                row = {number[old]: bond[old]}
                row |= {column: n for i, n in bond.items() if i != old for column in self.of_unit[i]}
                rows.append((row, most))
        return rows

    def sharing(self) -> set[int]:
        """Units that a shared column hangs on."""
        return {i for old in self.shared for bond, _ in self._bonds[old] for i in bond if i != old}

    def _on_one_way(self, bonds: list[Bond]) -> bool:
        """Whether at most a unit and one inside it can ever be recomputed together of all that are named."""
        around = self._candidates.around
        named = sorted({i for bond, _ in bonds for i in bond if i < self.n_units})
        return all(
            i in around[j] or j in around[i] or self._overlap(i, j)
            for place, i in enumerate(named) for j in named[place + 1 :]
        )  # fmt: skip

    def _overlap(self, i: int, j: int) -> bool:
        """Whether no policy has both: they share a block, or one that is kept apart lies in the other."""
        ours, theirs = (self._candidates.units[one].unit.blocks for one in (i, j))
        if self._kept_apart[i] or self._kept_apart[j]:
            return any(is_within(a, b) or is_within(b, a) for a in ours for b in theirs)
        return not set(ours).isdisjoint(theirs)

    def _effects(self) -> tuple[NDArray[np.intp], NDArray[np.intp], Values]:
        """How much of each column of pieces.py a column is, one that is inside another beside what that one is."""
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
    """What hangs on others stands behind them."""
    by_column: dict[int, list[Bond]] = defaultdict(list)
    for bond in bonds:
        by_column[max(bond[0])].append(bond)
    return by_column


def _tight(bonds: list[Bond], column: int, taken: dict[int, float]) -> float:
    """A column of pieces.py as low in bytes as its bonds let it: what is gone at most, what is kept at least."""
    frees = bonds[0][0][column] > 0
    slacks = [most - sum(n * row[i] for i, n in taken.items() if i in row) for row, most in bonds]
    return min(1.0, max(0.0, min(slacks) if frees else -min(slacks)))
