"""The call of the solver HiGHS (scipy.optimize.milp): a program over columns, solved over classes of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from explorer.errors import NotOnThisDevice, message_of
from explorer.plan.planners.classes import Classes, classes_of
from explorer.plan.planners.columns import Columns, Row, Values
from explorer.plan.planners.solver_output import on_stderr

MIB = 1024**2
TOLERANCE = 0.001
"""The proven gap to the best value, as a share, at which a solution is good enough."""
SCALE = 1000.0
"""Costs are passed in thousandths of the step's cost, because tolerances of the solver are absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
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
    apart: bool = False
    """True: choose single units. False: count the units of each class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """The lower bound that the solver proved, and the solution."""

    bound: float
    """Cost, or bytes of the peak."""
    x: Values
    """Values of the columns. Their sum falls below the counts of the classes if segments would have to overlap."""
    peak_bytes: float
    slack: Values
    """Slack of each row of the question."""


def minimised(columns: Columns, question: Question) -> Minimum | None:
    """The cheapest choice (or the lowest peak) that satisfies the rows; None if there is none, or time ran out."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise NotOnThisDevice(
            f"Planning needs scipy, which could not be loaded: {message_of(error)}.",
            hint="pip install -r requirements.txt",
        ) from error
    costs = columns.costs / columns.unit_cost * SCALE
    asked = np.vstack([costs, *(_dense(row, columns.n_columns) for row, _ in question.rows)])
    classes = classes_of(columns, asked, apart=question.apart)
    objective = np.zeros(len(classes.sizes))
    objective[classes.labels] = 0.0 if question.for_peak else costs
    objective[classes.labels[columns.peak_column]] = 1.0 if question.for_peak else 0.0
    rows = [classes.of(row) for row in question.rows]
    rows += _limits(question, columns, classes, objective)
    rows += classes.rows
    most = classes.sizes.copy()
    most[classes.labels[columns.peak_column]] = np.inf
    whole = np.ones(len(most), dtype=np.int64)
    whole[classes.labels[len(columns.ways) :]] = 0
    with on_stderr():
        result = milp(
            objective,
            integrality=whole if question.whole else None,
            bounds=Bounds(0.0, most),
            constraints=LinearConstraint(_sparse(rows, len(most)), -np.inf, np.array([bound for _, bound in rows])),
            options={"time_limit": question.seconds, "mip_rel_gap": TOLERANCE / 2},
        )
    if result.x is None:
        return None
    # HiGHS reports no dual bound for a program without integer variables: its optimum is the bound.
    bound = result.mip_dual_bound if question.whole and result.mip_dual_bound is not None else result.fun
    numbers = np.round(result.x) * (whole > 0) + result.x * (whole == 0) if question.whole else result.x
    x = classes.given(numbers, asked[1:].sum(axis=0))
    n = len(question.rows)
    return Minimum(
        bound=float(bound) * (MIB if question.for_peak else columns.unit_cost / SCALE),
        x=x,
        peak_bytes=float(x[columns.peak_column]) * MIB,
        slack=np.array([most for _, most in rows[:n]]) - _sparse(rows[:n], len(most)) @ result.x,
    )


def _limits(question: Question, columns: Columns, classes: Classes, objective: Values) -> list[Row]:
    """Rows for the cost limit and for the known lower bound of the objective."""
    limits: list[Row] = []
    if question.most_cost is not None:
        costs = {int(column): float(columns.costs[column]) for column in np.flatnonzero(columns.costs)}
        scaled = {column: n / columns.unit_cost * SCALE for column, n in costs.items()}
        limits.append(classes.of((scaled, question.most_cost / columns.unit_cost * SCALE)))
    if question.bound > 0:
        known = question.bound / MIB if question.for_peak else question.bound / columns.unit_cost * SCALE
        least = {int(label): -float(objective[label]) for label in np.flatnonzero(objective)}
        limits.append((least, -known * (1 - 1e-9)))
    return limits


def _dense(row: dict[int, float], n_columns: int) -> Values:
    dense = np.zeros(n_columns)
    dense[list(row)] = list(row.values())
    return dense


def _sparse(rows: Sequence[Row], n_columns: int) -> Any:
    from scipy.sparse import csr_matrix

    counts = [len(row) for row, _ in rows]
    columns = [column for row, _ in rows for column in row]
    values = [n for row, _ in rows for n in row.values()]
    return csr_matrix((values, columns, np.concatenate(([0], np.cumsum(counts)))), shape=(len(rows), n_columns))
