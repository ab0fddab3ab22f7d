"""Equal blocks are given the mean of their times; everything else keeps its own."""

from __future__ import annotations

import msgspec
import pytest

from explorer.plan.forecast.equal_times import kin_of, with_equal_times
from explorer.plan.forecast.forecast import Forecaster
from explorer.record import Measurement, Policy, RunSpec
from explorer.record.measurement import Samples
from tests import graphs

GRAPH = graphs.gpt(3)
MM = "aten.mm.default"


def timed(**ms: float) -> Measurement:
    """With these forward times by the last part of a block's name, twice as long in its operators."""
    run = graphs.measured(GRAPH, RunSpec(model=GRAPH.model))
    blocks = tuple(
        msgspec.structs.replace(one, forward=Samples(ms=(ms[name],)), operator_ms={MM: 2 * ms[name]})
        if (name := one.fqn.replace("blocks.", "b")) in ms
        else one
        for one in run.blocks
    )
    return msgspec.structs.replace(run, blocks=blocks)


def test_kin_are_the_same_place_in_repeated_blocks() -> None:
    assert kin_of(GRAPH, "blocks.2.attention") == kin_of(GRAPH, "blocks.0.attention")
    assert len({kin_of(GRAPH, fqn) for fqn in ("blocks.1", "blocks.1.attention", "blocks.1.mlp", "norm", "head")}) == 5


def test_kin_take_the_mean_and_others_keep_their_own() -> None:
    before = timed(b0=3, b1=5, b2=1, norm=7)
    after = with_equal_times(before, GRAPH)
    assert [after.by_fqn[f"blocks.{i}"].forward.median_ms for i in range(3)] == [3, 3, 3]
    assert [after.by_fqn[f"blocks.{i}"].operator_ms for i in range(3)] == [{MM: 6}] * 3
    assert after.by_fqn["norm"] == before.by_fqn["norm"] and after.by_fqn[""] == before.by_fqn[""]
    assert after.blocks[0].fqn == before.blocks[0].fqn and len(after.blocks) == len(before.blocks)


def test_a_forecast_takes_equal_blocks_for_equal() -> None:
    run = timed(b0=3, b1=5, b2=1)
    ratios = [Forecaster(run, GRAPH).forecast(Policy.recompute([f"blocks.{i}"])).time_ratio for i in range(3)]
    assert ratios[0] is not None and ratios == [pytest.approx(ratios[0])] * 3
    alone = [Forecaster(run).forecast(Policy.recompute([f"blocks.{i}"])).time_ratio for i in range(3)]
    assert len(set(alone)) == 3, "without the graph nobody knows which are equal"
