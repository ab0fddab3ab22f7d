"""Symmetry of the program: equal units are counted instead of chosen, such as how many of a hundred equal blocks.

Two variables are in one class if they cost the same and hold the same bytes at every moment of the program. The
variables inside them are in equal classes too. The rows of equal places are added up. Every policy satisfies the summed
rows, so their lower bound is valid for the policies. The summed rows lose which segments overlap. A solution in counts
is therefore assigned to units greedily, and the assignment can fail.

The first of equal blocks are assigned first: backward reaches them last, when the other blocks have freed most memory.
HiGHS's own symmetry detection does not replace the counts: it takes twenty times as long on a GPT of twelve blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from explorer.plan.planners.variables import PlaceRow, Row, Values, Variables

Labels = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """Classes of variables that are counted together, and rows over their counts."""

    variables: Variables
    labels: Labels
    """The class of each variable."""
    sizes: Values
    """Number of variables in each class."""
    rows: list[Row]
    """Rows over classes that every policy satisfies."""

    def counted(self, row: Row) -> Row:
        """`row` over classes instead of variables. Variables of one class have equal coefficients."""
        coefficients, most = row
        return {int(self.labels[variable]): n for variable, n in coefficients.items()}, most

    def assigned(self, counts: Values, weight: Values) -> Values:
        """Values of the variables from the counts of the classes, assigned greedily; a count may be left over.

        `weight` orders the classes: the lowest frees the most bytes.
        """
        variables, left, labels = self.variables, counts.copy(), self.labels
        x, free = np.zeros(variables.n_variables), np.ones(len(variables.paths))
        members: dict[int, list[int]] = defaultdict(list)
        for variable in range(len(variables.of_choice)):
            if left[labels[variable]] > 1e-9:
                members[int(labels[variable])].append(variable)
        along, below = variables.along, variables.below
        for inside in (False, True):
            classes = [one for one in members.values() if (variables.of_choice[one[0]][1] is not None) == inside]
            for one in sorted(classes, key=lambda one: (-len(along[one[0]]), weight[one[0]])):
                for variable in one:
                    paths = along[variable]
                    x[variable] = min(left[labels[variable]], free[paths].min())
                    left[labels[variable]] -= x[variable]
                    free[paths] -= x[variable]
                    free[below[variable]] = x[variable]
        rest = slice(len(variables.of_choice), None)
        x[rest] = counts[labels[rest]]
        return x


def classes_of(variables: Variables, coefficients: Values, *, single_units: bool = False) -> Classes:
    """Classes of variables with equal columns of `coefficients`; `single_units`: each variable is a class."""
    if single_units:
        labels, kinds = np.arange(variables.n_variables), list(range(len(variables.paths)))
    else:
        labels, kinds = _labels(variables, coefficients)
    paths_of_kind: dict[int, list[PlaceRow]] = defaultdict(list)
    for path, kind in zip(variables.paths, kinds):
        paths_of_kind[kind].append(path)
    classes = Classes(variables=variables, labels=labels, sizes=np.bincount(labels).astype(np.float64), rows=[])
    classes.rows.extend(_sum(classes, [path.row for path in paths]) for paths in paths_of_kind.values())
    classes.rows.extend(map(classes.counted, variables.bound_rows()))
    return classes


def _sum(classes: Classes, rows: list[Row]) -> Row:
    total: dict[int, float] = defaultdict(float)
    for row, _ in rows:
        for variable, n in row.items():
            total[int(classes.labels[variable])] += n
    return {label: n / classes.sizes[label] for label, n in total.items()}, sum(most for _, most in rows)


def _labels(variables: Variables, coefficients: Values) -> tuple[Labels, list[int]]:
    """The class of each variable and of each path, from the innermost units outwards."""
    numbers: dict[Hashable, int] = {}

    def number(*key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    _, columns = np.unique(np.round(coefficients.T, 9), axis=0, return_inverse=True)
    column: list[int] = columns.ravel().tolist()
    for variable in (variable for i in variables.sharing() for variable in variables.of_unit[i]):
        column[variable] = -1 - variable
    places: dict[tuple[int, int | None], int] = {}
    for path in variables.paths:
        alone = None if path.holder is None else places[path.place, None]
        places[path.place, path.holder] = number(alone, None if path.innermost is None else column[path.innermost])

    def covered(variable: int) -> tuple[int, ...]:
        holder = variables.of_choice[variable][1]
        return tuple(sorted(places[variables.paths[path].place, holder] for path in variables.along[variable]))

    inside: dict[int, list[int]] = defaultdict(list)
    for variable, (_, holder) in enumerate(variables.of_choice):
        if holder is not None:
            inside[holder].append(variable)
    labels = np.arange(variables.n_variables) - variables.n_variables
    for i in variables.inside_out:
        within = sorted((int(labels[variables.of_choice[v][0]]), column[v], covered(v)) for v in inside[i])
        below = sorted(places[variables.paths[path].place, i] for path in variables.below[i])
        labels[i] = number("unit", column[i], covered(i), tuple(within), tuple(below))
    for variable, (i, holder) in enumerate(variables.of_choice):
        if holder is not None:
            key = (int(labels[holder]), int(labels[i]), column[variable], covered(variable))
            labels[variable] = number("inside", *key)
    kinds = [
        number("row", None if path.holder is None else int(labels[path.holder]), places[path.place, path.holder])
        for path in variables.paths
    ]
    return np.unique(labels, return_inverse=True)[1].ravel(), kinds
