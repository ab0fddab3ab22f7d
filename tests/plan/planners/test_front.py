"""The front is told plan by plan; a wish is answered by one plan, or by what can be reached."""

from __future__ import annotations

import math

import msgspec
import pytest

from explorer.plan.planners.front import find_plans, undominated
from explorer.plan.policy.presets import preset, preset_titles
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import RunSpec
from explorer.record.plan import Progress, Wish, silent
from tests import graphs
from tests.plan.planners.samples import graph_and_run

MIB = 1024**2
GRAPH = graphs.gpt(3)
RUN = graphs.measured(GRAPH, RunSpec(model=GRAPH.model))


def test_every_plan_is_told_as_soon_as_it_is_found() -> None:
    told: list[Progress] = []
    front = find_plans(RUN, GRAPH, Wish(), told.append)
    peaks = [plan.step_peak_bytes for plan in front.plans]
    assert peaks[0] == RUN.step_peak_bytes == max(peaks) and len(set(peaks)) > 2
    assert [progress.done for progress in told] == list(range(len(told)))
    growing = [len(progress.plans) for progress in told]
    assert growing[0] == 0 and growing == sorted(growing) and all(growing[1:])
    assert told[-1].plans == front.plans
    assert not front.plans[0].policy.units


def test_what_another_plan_beats_is_no_point_of_the_front() -> None:
    some = find_plans(RUN, GRAPH, Wish(), silent).plans
    dearer = msgspec.structs.replace(some[1], extra_cost=some[2].extra_cost * 1.5)
    again = msgspec.structs.replace(some[1], budget_bytes=some[1].step_peak_bytes)
    assert undominated((*some, again)) == some
    assert undominated((some[0], dearer, *some[2:])) == (some[0], *some[2:])
    for_nothing = msgspec.structs.replace(some[1], extra_cost=0.0)
    assert undominated((some[0], for_nothing)) == (some[0], for_nothing)


@pytest.mark.parametrize("sample", ["gpt", "mlp", "resnet"])
def test_no_preset_lies_below_the_front(sample: str) -> None:
    graph, run = graph_and_run(sample)
    front, forecaster = find_plans(run, graph, Wish(), silent).plans, Forecaster(run, graph)
    n_presets = 0
    for name in preset_titles():
        policy = preset(name, graph)
        if all(unit.action == "recompute" for unit in policy.units):
            foretold = forecaster.forecast(policy)
            assert foretold.step_peak_bytes is not None and foretold.time_ratio is not None
            n_presets += 1
            assert any(
                plan.step_peak_bytes <= foretold.step_peak_bytes
                and (plan.cost_ratio or math.inf) <= foretold.time_ratio * (1 + 1e-9)
                for plan in front
            ), name
    assert n_presets > 5


def test_a_wish_is_answered_by_one_plan() -> None:
    (plan,) = find_plans(RUN, GRAPH, Wish(budget_bytes=40 * MIB), silent).plans
    assert plan.step_peak_bytes <= 40 * MIB == plan.budget_bytes and plan.policy.units
    (plan,) = find_plans(RUN, GRAPH, Wish(more_time=0.2), silent).plans
    assert plan.cost_ratio is not None and plan.cost_ratio <= 1.2 and plan.step_peak_bytes < (RUN.step_peak_bytes or 0)


def test_a_wish_that_cannot_be_is_told_what_can() -> None:
    floor = find_plans(RUN, GRAPH, Wish(), silent).plans[-1]
    refused = find_plans(RUN, GRAPH, Wish(budget_bytes=MIB), silent)
    assert f"least that can be reached is {floor.step_peak_bytes / MIB:.1f} MiB" in refused.refusal
    assert [plan.step_peak_bytes for plan in refused.plans] == [floor.step_peak_bytes]
