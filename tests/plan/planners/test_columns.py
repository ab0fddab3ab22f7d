"""Columns stand for policies: their rows let through every policy and nothing else, their bytes are the forecast's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.plan.planners.among import DEEP, KEEPING, WIDE, Among, planner_of, point, policies


@pytest.mark.parametrize(
    "among", [DEEP, WIDE, [*WIDE, "blocks.0"], KEEPING], ids=["deep", "segments", "segments and a block", "keeping"]
)
def test_the_rows_of_places_let_through_policies_and_nothing_else(among: Among) -> None:
    planner = planner_of(among)
    variables = planner._program.variables
    every = {tuple(point(variables, chosen, planner.candidates.around).tolist()) for chosen in policies(planner)}
    assert len(variables.of_choice) <= 16
    points = np.array(list(itertools.product((0.0, 1.0), repeat=len(variables.of_choice))))
    for path in variables.paths:
        most = 1.0 if path.holder is None else points[:, path.holder]
        points = points[points[:, list(path.variables)].sum(axis=1) <= most]
    assert {(*taken, 0.0) for taken in points.tolist()} == every and len(every) > 10
