"""The linear line is the forecast's own line, byte for byte, but at the moments of reruns, which reruns.py adds."""

from __future__ import annotations

import numpy as np
import pytest

from tests.plan.planners.alone import planner_and_forecaster, taken_alone


@pytest.mark.parametrize("sample", ["gpt", "unet"])
def test_the_line_of_each_candidate_alone_is_the_forecasts(sample: str) -> None:
    planner, forecaster = planner_and_forecaster(sample)
    program = planner._program
    for i in range(len(planner.candidates.units)):
        line, foreseen = (
            program.timeline.line(program.line, taken_alone(program, i)),
            forecaster.line(planner.policy((i,))),
        )
        ticks = {rerun.tick for rerun in program.reruns if rerun.unit == i}
        assert foreseen is not None
        assert set(np.flatnonzero(line != foreseen).tolist()) <= ticks, planner.candidates.units[i].unit


def test_the_bytes_at_a_tick_are_those_of_the_line() -> None:
    planner, _ = planner_and_forecaster("unet")
    program = planner._program
    x = np.random.default_rng(0).random(program.timeline.n_factors)
    line = program.timeline.line(program.line, x)
    for tick in range(0, len(line), 97):
        assert program.line[tick] + program.timeline.at(tick) @ x == pytest.approx(line[tick], abs=1e-3)
