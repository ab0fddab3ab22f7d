"""Counting what a question cannot tell apart leaves no policy out, and what was counted can be given back."""

from __future__ import annotations

import random

import numpy as np
import pytest

from explorer.plan.planners.symmetry import Classes, classes_of
from explorer.plan.planners.variables import Values
from tests.plan.planners.test_budget import known, planner
from tests.plan.planners.test_columns import point

GRAPH, _ = known("gpt12")
PLANNER = planner("gpt12")
COLUMNS, AROUND = PLANNER._program.variables, PLANNER.candidates.around
N_MOMENTS = 3


def asked() -> Values:
    """Costs, and the bytes of the moments that hold most with everything kept."""
    over = PLANNER._program.over(np.zeros(COLUMNS.n_variables), 0.9 * PLANNER.keep_all_bytes)
    rows = np.zeros((1 + N_MOMENTS, COLUMNS.n_variables))
    rows[0] = COLUMNS.costs
    for row, (_, row_of) in zip(rows[1:], over):
        for column, n_bytes in row_of()[0].items():
            row[column] = n_bytes
    return rows


def counted(classes: Classes, x: Values) -> Values:
    return np.bincount(classes.labels, x, len(classes.sizes)).astype(np.float64)


@pytest.mark.parametrize("seed", range(20))
def test_the_numbers_of_every_policy_keep_the_rows_and_make_a_policy_that_costs_and_holds_the_same(seed: int) -> None:
    says = asked()
    classes = classes_of(COLUMNS, says)
    order = random.Random(seed).sample(range(COLUMNS.n_units), COLUMNS.n_units)
    x = point(COLUMNS, tuple(COLUMNS.legal(order)[: seed + 1]), AROUND)
    numbers = counted(classes, x)
    for row, most in classes.rows:
        assert sum(n * numbers[label] for label, n in row.items()) <= most + 1e-9
    other = classes.assigned(numbers, says.sum(axis=0))
    given = np.array_equal(counted(classes, other), numbers)
    if given:
        assert COLUMNS.legal(COLUMNS.chosen(other)) == list(COLUMNS.chosen(other))
        assert says @ other == pytest.approx(says @ x)
    assert given or any(len(PLANNER.candidates.units[i].unit.blocks) > 1 for i in COLUMNS.chosen(x))


def test_equal_blocks_are_counted_and_the_first_of_them_are_taken() -> None:
    classes = classes_of(COLUMNS, np.zeros((1, COLUMNS.n_variables)))
    blocks = [i for i, one in enumerate(PLANNER.candidates.units) if one.unit.blocks[0] in GRAPH.repeats]
    units = [one.unit for one in PLANNER.candidates.units]
    whole = [i for i in blocks if len(units[i].blocks) == 1 and units[i].action == "recompute"]
    assert len(whole) == 12 and len({classes.labels[i] for i in whole}) == 1
    numbers = np.zeros(len(classes.sizes))
    numbers[classes.labels[whole[0]]] = 4
    x = classes.assigned(numbers, np.zeros(COLUMNS.n_variables))
    assert COLUMNS.chosen(x) == tuple(whole[:4])


def test_segments_that_would_have_to_overlap_are_not_given() -> None:
    classes = classes_of(COLUMNS, np.zeros((1, COLUMNS.n_variables)))
    lengths = {i: len(one.unit.blocks) for i, one in enumerate(PLANNER.candidates.units)}
    triple = next(i for i, n in lengths.items() if n == 3)
    numbers = np.zeros(len(classes.sizes))
    numbers[classes.labels[triple]] = 5
    assert 0 < counted(classes, classes.assigned(numbers, np.zeros(COLUMNS.n_variables)))[classes.labels[triple]] < 5


def test_apart_every_column_is_its_own() -> None:
    classes = classes_of(COLUMNS, asked(), single_units=True)
    assert len(set(classes.labels.tolist())) == COLUMNS.n_variables == len(classes.sizes)
