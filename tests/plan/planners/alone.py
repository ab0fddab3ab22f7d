"""One candidate recomputed and nothing else, for the parts of the program and for the forecast."""

from __future__ import annotations

from functools import cache

import numpy as np

from explorer.plan.planners.planner import Planner
from explorer.plan.planners.program import Program
from explorer.plan.planners.variables import Values
from explorer.plan.predict.forecaster import Forecaster
from tests.plan.planners.test_budget import known


@cache
def planner_and_forecaster(sample: str) -> tuple[Planner, Forecaster]:
    graph, run = known(sample)
    return Planner(run, graph), Forecaster(run, graph)


def taken_alone(program: Program, unit: int) -> Values:
    """The columns of pieces.py, those that hang on `unit` as low in bytes as their bonds let them."""
    variables = program.variables
    x = np.zeros(variables.n_variables)
    x[variables.number[unit, None]] = 1.0
    return variables.factors(x)
