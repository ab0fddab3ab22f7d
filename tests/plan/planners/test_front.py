"""A budget is read as people type it; the front is told plan by plan, and a wish is answered by one plan."""

from __future__ import annotations

import msgspec
import pytest

from explorer.errors import BadInput
from explorer.plan.planners.budget import parse_budget, parse_share, parse_wish
from explorer.plan.planners.front import find_plans, undominated
from explorer.plan.planners.planner import Planner
from explorer.record import RunSpec
from explorer.record.plan import Progress, Wish, silent
from tests import graphs
from tests.plan.planners.samples import graph_and_run
from tests.view.builders import Chain, measured

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "wish"),
    [
        ("60 MiB", Wish(budget_bytes=60 * MIB)),
        (" 1.5gib ", Wish(budget_bytes=1536 * MIB)),
        ("1,5 GiB", Wish(budget_bytes=1536 * MIB)),
        ("123456B", Wish(budget_bytes=123456)),
        ("50 %", Wish(budget_bytes=100 * MIB)),
        ("50%", Wish(budget_bytes=100 * MIB)),
        ("120 %", Wish(budget_bytes=240 * MIB)),
        ("+10 % time", Wish(more_time=0.1)),
        ("+10%", Wish(more_time=0.1)),
        ("10 % time", Wish(more_time=0.1)),
        ("+0 % time", Wish(more_time=0.0)),
    ],
)
def test_a_budget_is_read_as_it_is_meant(text: str, wish: Wish) -> None:
    assert parse_wish(text, 200 * MIB) == wish


@pytest.mark.parametrize(
    "text", ["-3", "abc", "", "60", "-5 MiB", "+60 MiB", "50 % MiB", "60 MB", "1e9 GiB", "nan %", "0 %", "10 time",
             "60 MiB please", "+99999999 % time", "201%"],
)  # fmt: skip
def test_what_is_no_budget_gets_one_sentence(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_wish(text, 200 * MIB)
    assert caught.value.sentence.endswith(".") and "\n" not in caught.value.sentence
    assert caught.value.hint


def test_budgets_as_people_write_them() -> None:
    run = msgspec.structs.replace(measured(Chain()), free_memory_bytes=1600)
    assert parse_budget("1.5GiB", 1, run) == 1.5 * 2**30
    assert parse_budget("60%", 1000, run) == 600
    assert parse_budget("device", 1000, run) == 1500
    own = msgspec.structs.replace(run, origin="recorded")
    assert own.allocations is not None
    assert parse_budget("device", 1000, own) == 1500 + own.allocations.held_bytes[-1]
    assert parse_share("+10%") == pytest.approx(0.1)
    assert parse_budget(1234, 1000, run) == 1234
    for wrong in ("0%", "-5%", "much", "0B", "60", "1000%", "99999999TiB", "+10%", "+10 % time", 0, -1):
        with pytest.raises(BadInput):
            parse_budget(wrong, 1000, run)
    with pytest.raises(BadInput, match="does not say what its device had free"):
        parse_budget("device", 1000, measured(Chain()))
    with pytest.raises(BadInput, match="is not a share"):
        parse_share("10")


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


def test_no_preset_lies_below_the_front() -> None:
    graph, run = graph_and_run("gpt")
    front, planner = find_plans(run, graph, Wish(), silent).plans, Planner(run, graph)
    presets = list(planner.presets())
    assert len(presets) > 5
    for peak_bytes, cost in presets:
        assert any(plan.step_peak_bytes <= peak_bytes and plan.extra_cost <= cost * (1 + 1e-9) for plan in front)


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
