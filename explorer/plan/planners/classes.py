"""Symmetry of the program: equal units are counted instead of chosen, such as how many of a hundred equal blocks.

Two columns are in one class if they cost the same and hold the same bytes at every moment of the program. The columns
inside them are in equal classes too. The rows of equal places are added up. Every policy satisfies the summed rows, so
their lower bound is valid for the policies. The summed rows lose which segments overlap. A solution in counts is
therefore assigned to units greedily, and the assignment can fail.

The first of equal blocks are assigned first: backward reaches them last, when the other blocks have freed most memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorer.plan.planners.columns import Columns, PlaceRow, Row, Values

Labels = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """Classes of columns that are counted together, and rows over their counts."""

    columns: Columns
    labels: Labels
    """The class of each column."""
    sizes: Values
    """Number of columns in each class."""
    rows: list[Row]
    """Rows over classes that every policy satisfies."""

    def of(self, row: Row) -> Row:
        """`row` over classes instead of columns. Columns of one class have equal coefficients."""
        coefficients, most = row
        return {int(self.labels[column]): n for column, n in coefficients.items()}, most

    def given(self, numbers: Values, weight: Values) -> Values:
        """Values of the columns from the counts of the classes, assigned greedily; a count may be left over.

        `weight` orders the classes: the lowest frees the most bytes.
        """
        columns, left = self.columns, numbers.copy()
        x, free = np.zeros(columns.n_columns), np.ones(len(columns.paths))
        members: dict[int, list[int]] = defaultdict(list)
        for column in range(len(columns.ways)):
            if left[self.labels[column]] > 1e-9:
                members[int(self.labels[column])].append(column)
        along, below = columns.along, columns.below
        for inside in (False, True):
            some = [one for one in members.values() if (columns.ways[one[0]][1] is not None) == inside]
            for one in sorted(some, key=lambda one: (-len(along[one[0]]), weight[one[0]])):
                for column in one:
                    paths = along[column]
                    x[column] = min(left[self.labels[column]], free[paths].min())
                    left[self.labels[column]] -= x[column]
                    free[paths] -= x[column]
                    free[below[column]] = x[column]
        rest = slice(len(columns.ways), None)
        x[rest] = numbers[self.labels[rest]]
        return x


def classes_of(columns: Columns, asked: Values, *, apart: bool = False) -> Classes:
    """Classes from the coefficients `asked` (one column of `asked` for each column); `apart`: no two share a class."""
    if apart:
        labels = np.arange(columns.n_columns)
        rows = [_row(columns, path) for path in columns.paths]
        return Classes(
            columns=columns, labels=labels, sizes=np.ones(columns.n_columns), rows=rows + columns.bond_rows()
        )
    labels, kinds = _labels(columns, asked)
    sizes = np.bincount(labels).astype(np.float64)
    together: dict[int, list[PlaceRow]] = defaultdict(list)
    for path, kind in zip(columns.paths, kinds):
        together[kind].append(path)
    merged = Classes(columns=columns, labels=labels, sizes=sizes, rows=[])
    merged.rows.extend(_added_up(merged, [_row(columns, path) for path in paths]) for paths in together.values())
    merged.rows.extend(map(merged.of, columns.bond_rows()))
    return merged


def _row(columns: Columns, path: PlaceRow) -> Row:
    row = dict.fromkeys(path.columns, 1.0)
    return (row, 1.0) if path.holder is None else ({**row, path.holder: -1.0}, 0.0)


def _added_up(classes: Classes, rows: list[Row]) -> Row:
    total: dict[int, float] = defaultdict(float)
    for row, _ in rows:
        for column, n in row.items():
            total[int(classes.labels[column])] += n
    return {label: n / classes.sizes[label] for label, n in total.items()}, sum(most for _, most in rows)


def _labels(columns: Columns, asked: Values) -> tuple[Labels, list[int]]:
    """The class of each column and of each path, from the innermost units outwards."""
    known: dict[Hashable, int] = {}

    def number(*key: Hashable) -> int:
        return known.setdefault(key, len(known))

    _, says = np.unique(np.round(asked.T, 9), axis=0, return_inverse=True)
    asked_class: list[int] = says.ravel().tolist()
    for column in (column for i in columns.sharing() for column in columns.of_unit[i]):
        asked_class[column] = -1 - column
    places: dict[tuple[int, int | None], int] = {}
    for path in columns.paths:
        alone = None if path.holder is None else places[path.place, None]
        places[path.place, path.holder] = number(alone, None if path.innermost is None else asked_class[path.innermost])

    def covered(column: int) -> tuple[int, ...]:
        holder = columns.ways[column][1]
        return tuple(sorted(places[columns.paths[path].place, holder] for path in columns.along[column]))

    inside: dict[int, list[int]] = defaultdict(list)
    for column, (_, o) in enumerate(columns.ways):
        if o is not None:
            inside[o].append(column)
    labels = np.arange(columns.n_columns) - columns.n_columns
    for i in columns.inside_out:
        within = sorted((int(labels[columns.ways[one][0]]), asked_class[one], covered(one)) for one in inside[i])
        below = sorted(places[columns.paths[path].place, i] for path in columns.below[i])
        labels[i] = number("unit", asked_class[i], covered(i), tuple(within), tuple(below))
    for column, (i, o) in enumerate(columns.ways):
        if o is not None:
            labels[column] = number("inside", int(labels[o]), int(labels[i]), asked_class[column], covered(column))
    kinds = [
        number("row", None if path.holder is None else int(labels[path.holder]), places[path.place, path.holder])
        for path in columns.paths
    ]
    return np.unique(labels, return_inverse=True)[1].ravel(), kinds
