"""The line of a policy before a run: its top is the predicted peak, and it lies on the measured events."""

from __future__ import annotations

import pytest

from explorer.plan.predict.forecaster import Forecaster
from explorer.record import Policy
from explorer.view.memory.stacked import roles
from explorer.view.memory.timeline import NAME, add_predicted, timeline
from tests.view.builders import MIB, measured


@pytest.mark.parametrize("blocks", [["layers.0"], ["layers.1", "layers.4"], [f"layers.{i}" for i in range(6)]])
def test_the_top_of_the_line_is_the_predicted_peak(blocks: list[str]) -> None:
    forecaster = Forecaster(measured())
    policy = Policy.recompute(blocks)
    line = forecaster.line(policy)
    assert line is not None and int(line.max()) == forecaster.forecast(policy).step_peak_bytes
    reentrant = Policy.recompute(blocks, use_reentrant=True)
    assert forecaster.line(reentrant) is None and forecaster.forecast(reentrant).step_peak_bytes is None


def test_it_is_drawn_dashed_over_one_run_and_over_two() -> None:
    base, older = measured(), measured(recompute=(0,))
    line = Forecaster(base).line(Policy.recompute(["layers.1"]))
    assert line is not None
    for chart, over in ((roles(base), None), (timeline(base, older), older)):
        add_predicted(chart, line, base, over=over, axis="tick")
        (drawn,) = [trace for trace in chart.figure.data if trace.name == NAME]
        assert drawn.line.dash == "dash" and max(drawn.y) == pytest.approx(int(line.max()) / MIB)
    n = len(chart.figure.data)
    add_predicted(chart, line[:-1], base, over=None, axis="tick")
    assert len(chart.figure.data) == n, "a line of another run is not drawn"
