"""The moment at which a choice holds most is where the forecast says that it peaks."""

from __future__ import annotations

import pytest

from tests.plan.planners.among import DEEP, KEEPING, WIDE, Among, planner_of, point, policies


@pytest.mark.parametrize("among", [DEEP, WIDE, KEEPING], ids=["deep", "wide", "keeping"])
def test_the_moment_that_holds_most_holds_the_peak_of_the_forecast(among: Among) -> None:
    planner = planner_of(among)
    program = planner._program
    for chosen in policies(planner):
        peak = program.peak(chosen)
        x = point(program.variables, chosen, planner.candidates.around)
        assert not program.over(x, peak)
        (_, row_of), *_ = program.over(x, peak - 2)
        row, most = row_of()
        assert sum(n * x[column] for column, n in row.items()) - most == pytest.approx(peak, abs=1)
        assert float(program.variables.costs @ x) == pytest.approx(program.variables.cost(chosen))
