"""The call of the solver HiGHS: a program over variables, solved over classes of equal variables.

Equal units are counted instead of chosen, such as how many of a hundred equal blocks. Two variables are in one class if
they cost the same and hold the same bytes at every moment of the program. The variables inside them are in equal
classes too. The rows of equal places are added up. Every policy satisfies the summed rows, so their lower bound is
valid for the policies. The summed rows lose which segments overlap. A solution in counts is therefore assigned to units
greedily, and the assignment can fail.

The first of equal blocks are assigned first: backward reaches them last, when the other blocks have freed most memory.
HiGHS's own symmetry detection does not replace the counts: it takes twenty times as long on a GPT of twelve blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explorer.errors import NotOnThisDevice, message_of
from explorer.plan.planners.linear_memory import Row
from explorer.plan.planners.variables import PlaceRow, Values, Variables
from explorer.record.base import Record

Labels = NDArray[np.intp]
MIB = 1024**2
TOLERANCE = 0.001
"""The proven gap to the best value, as a share, at which a solution is good enough."""
SCALE = 1000.0
"""Costs are passed in thousandths of the step's cost, because tolerances of the solver are absolute."""
FEASIBLE = 2
"""HiGHS's status of a solution that satisfies all rows."""


class Question(Record):
    """A program for the solver."""

    rows: Sequence[Row]
    for_peak: bool
    """True: minimise the peak. False: minimise the cost."""
    most_cost: float | None
    seconds: float
    bound: float = 0.0
    """A known lower bound of the objective."""
    whole: bool = True
    """True: the variables are integers. False: the relaxed program with fractions."""
    single_units: bool = False
    """True: choose single units. False: count the units of each class."""


class Minimum(Record):
    """The lower bound that the solver proved, and the solution."""

    bound: float
    """Cost, or bytes of the peak."""
    x: Values
    """Values of the variables. Their sum falls below the counts of the classes if segments would have to overlap."""
    peak_bytes: float
    slack: Values
    """Slack of each row of the question."""


def minimised(variables: Variables, question: Question) -> Minimum | None:
    """The cheapest choice (or the lowest peak) that satisfies the rows; None if there is none, or time ran out."""
    costs = variables.costs / variables.unit_cost * SCALE
    coefficients = np.vstack([costs, *(_dense(row, variables.n_variables) for row, _ in question.rows)])
    classes = classes_of(variables, coefficients, single_units=question.single_units)
    objective = np.zeros(len(classes.sizes))
    objective[classes.labels] = 0.0 if question.for_peak else costs
    objective[classes.labels[variables.peak]] = 1.0 if question.for_peak else 0.0
    rows = [classes.counted(row) for row in question.rows]
    if question.most_cost is not None:
        prices = {int(i): float(costs[i]) for i in np.flatnonzero(costs)}
        rows.append(classes.counted((prices, question.most_cost / variables.unit_cost * SCALE)))
    if question.bound > 0:
        least = question.bound / MIB if question.for_peak else question.bound / variables.unit_cost * SCALE
        values = {int(label): -float(objective[label]) for label in np.flatnonzero(objective)}
        rows.append((values, -least * (1 - 1e-9)))
    rows += classes.rows
    most = classes.sizes.copy()
    most[classes.labels[variables.peak]] = np.inf
    whole = np.zeros(len(most), dtype=np.uint8)
    whole[classes.labels[: len(variables.of_choice)]] = question.whole
    highs = _solved(objective, most, rows, whole, seconds=question.seconds)
    info, solution = highs.getInfo(), highs.getSolution()
    is_optimal = highs.modelStatusToString(highs.getModelStatus()) == "Optimal"
    if info.primal_solution_status != FEASIBLE or not (question.whole or is_optimal):
        return None
    # HiGHS proves a dual bound for a program with integer variables; the optimum of another program is the bound.
    bound = info.mip_dual_bound if question.whole else info.objective_function_value
    counts = np.array(solution.col_value)
    x = classes.assigned(np.where(whole > 0, np.round(counts), counts), coefficients[1:].sum(axis=0))
    n = len(question.rows)
    return Minimum(
        bound=bound * (MIB if question.for_peak else variables.unit_cost / SCALE),
        x=x,
        peak_bytes=float(x[variables.peak]) * MIB,
        slack=np.array([limit for _, limit in rows[:n]]) - np.array(solution.row_value[:n]),
    )


def _solved(costs: Values, most: Values, rows: Sequence[Row], whole: NDArray[np.uint8], *, seconds: float) -> Any:
    """HiGHS after it minimised `costs` over variables between 0 and `most`. It prints nothing and starts no thread."""
    try:
        from highspy import Highs, HighsStatus
    except ImportError as error:
        raise NotOnThisDevice(
            f"Planning needs highspy, which could not be loaded: {message_of(error)}.",
            hint="pip install -r requirements.txt",
        ) from error
    highs: Any = Highs()  # type: ignore[no-untyped-call]
    n, nothing = len(costs), np.zeros(0, dtype=np.int32)
    for option, value in (
        ("output_flag", False), ("threads", 1), ("mip_rel_gap", TOLERANCE / 2), ("time_limit", seconds),
    ):  # fmt: skip
        highs.setOptionValue(option, value)
    highs.addCols(n, costs, np.zeros(n), most, 0, nothing, nothing, np.zeros(0))
    starts = np.cumsum([0, *(len(row) for row, _ in rows)], dtype=np.int32)
    indices = np.array([column for row, _ in rows for column in row], dtype=np.int32)
    values = np.array([value for row, _ in rows for value in row.values()], dtype=np.float64)
    upper = np.array([limit for _, limit in rows], dtype=np.float64)
    highs.addRows(len(rows), np.full(len(rows), -np.inf), upper, len(values), starts[:-1], indices, values)
    if whole.any():
        highs.changeColsIntegrality(n, np.arange(n, dtype=np.int32), whole)
    if highs.run() == HighsStatus.kError:  # other code of this process runs HiGHS with threads, which all calls share
        highs.setOptionValue("threads", 0)
        highs.run()
    return highs


def _dense(row: dict[int, float], n_columns: int) -> Values:
    dense = np.zeros(n_columns)
    dense[list(row)] = list(row.values())
    return dense


class Classes(Record):
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
            equal = [group for group in members.values() if (variables.of_choice[group[0]][1] is not None) == inside]
            for group in sorted(equal, key=lambda group: (-len(along[group[0]]), weight[group[0]])):
                for variable in group:
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
    for paths in paths_of_kind.values():
        total: dict[int, float] = defaultdict(float)
        for variable, n in (item for path in paths for item in path.row[0].items()):
            total[int(labels[variable])] += n
        row = {label: n / classes.sizes[label] for label, n in total.items()}
        classes.rows.append((row, sum(path.row[1] for path in paths)))
    classes.rows.extend(map(classes.counted, variables.bound_rows()))
    return classes


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
