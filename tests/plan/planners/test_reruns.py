"""A rerun's moments hold what the forecast says that the step holds while a unit runs again."""

from __future__ import annotations

import pytest

from tests.plan.planners.alone import planner_and_forecaster, taken_alone


@pytest.mark.parametrize("sample", ["gpt", "unet"])
def test_the_rerun_of_each_candidate_alone_holds_what_the_forecast_says(sample: str) -> None:
    planner, forecaster = planner_and_forecaster(sample)
    program = planner._program
    n_reruns = 0
    for i in range(len(planner.candidates.units)):
        line, foreseen = (
            program.timeline.line(program.line, taken_alone(program, i)),
            forecaster.line(planner.policy((i,))),
        )
        assert foreseen is not None
        for rerun in program.reruns:
            if rerun.unit == i:
                n_reruns += 1
                held = line[rerun.tick] + int(rerun.alive.max())
                assert max(held, line[rerun.tick]) == foreseen[rerun.tick], planner.candidates.units[i].unit
    assert n_reruns >= len(planner.candidates.units)
