"""The table of all schedules on the same ranks."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.pipeline.plan.cuts import atoms, stages_by
from explorer.pipeline.plan.schedules import SCHEDULES, default_ranks, splits_backward
from explorer.pipeline.plan.stage_costs import predict
from explorer.pipeline.ui.equal_ranks import NOT_PREDICTED, schedules_table, stages_for
from explorer.record import Policy, RunSpec
from explorer.view.drawing.units import mib
from tests import graphs
from tests.pipeline.pipelines import planned, priced

POLICY = Policy.recompute(["blocks.1"])


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 20])
def test_each_schedule_is_forecast_on_the_same_ranks(n_ranks: int) -> None:
    graph = graphs.gpt()
    prices = priced(graph, RunSpec(model=graph.model))
    drawn = planned(graph, 2, n_microbatches=4)
    rows = schedules_table(prices, graph, drawn, POLICY, n_ranks)
    assert [row["schedule"] for row in rows] == list(SCHEDULES)
    for row in rows:
        name, n_stages = str(row["schedule"]), stages_for(str(row["schedule"]), n_ranks)
        assert row["stages"] == n_stages and default_ranks(name, n_stages) == n_ranks
        plan = replace(drawn, schedule=name, n_ranks=n_ranks)
        if splits_backward(plan):
            assert row["origin"] == NOT_PREDICTED and not row["step"]
        elif n_stages > len(atoms(graph)):
            assert "can be cut into" in str(row["origin"])
        elif row["origin"] != "predicted":
            assert name == "Interleaved1F1B" and "microbatches" in str(row["origin"]), "torch's own condition"
        else:
            plan = replace(plan, stages=stages_by("by-time", graph, n_stages, profile=prices))
            played = predict(prices, plan, POLICY)
            assert row["step"] == f"{played.makespan_ms:.1f} ms"
            assert row["fullest rank"] == mib(max(memory.device_bytes for memory in played.memory))
