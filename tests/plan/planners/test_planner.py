"""A plan is held against every policy there is: no cheaper one fits, and none goes below what the plan calls proven."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer.engine.bench.measure import measure
from explorer.errors import BadInput
from explorer.plan.names import above
from explorer.plan.planners.candidates import Named, unit_of
from explorer.plan.planners.planner import Planner
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.sizes import mib
from explorer.record import Measurement, ModelGraph, Policy
from explorer.record.plan import Plan
from explorer.record.policy import Unit
from tests.plan.planners.samples import OPS, UNEQUAL, encoder, graph_and_run, line_of, planner
from tests.view.builders import Chain


def subsets(n: int) -> Iterator[tuple[int, ...]]:
    for taken in itertools.product((False, True), repeat=n):
        yield tuple(i for i in range(n) if taken[i])


def is_at_most_nested_once(policy: Policy) -> bool:
    """And no block stands in two units."""
    named = set(policy.blocks)
    once = len(named) == len(policy.blocks)
    return once and all(sum(one in named for one in above(fqn)) <= 1 for fqn in policy.blocks)


def every_policy(chosen: Planner, run: Measurement, graph: ModelGraph) -> list[tuple[int, float]]:
    """Peak and cost of every policy made of the planner's candidates."""
    forecaster, costs = Forecaster(run, graph), []
    for taken in subsets(len(chosen.candidates.units)):
        policy = chosen.candidates.policy(taken)
        peak = forecaster.forecast(policy).step_peak_bytes
        if is_at_most_nested_once(policy) and peak is not None:
            costs.append((peak, chosen.candidates.cost(taken)))
    return costs


def holds_against(plan: Plan, every: list[tuple[int, float]], budget: int) -> None:
    best = min(cost for peak, cost in every if peak <= budget)
    assert plan.step_peak_bytes <= budget
    assert plan.certificate.bound <= best * (1 + 1e-9) + 1e-9, "what is called proven is beaten"
    assert plan.extra_cost <= best * 1.005 + 1e-9, "a cheaper policy fits"
    assert (plan.step_peak_bytes, pytest.approx(plan.extra_cost)) in every


BLOCKS = tuple(f"blocks.{i}" for i in range(3))
KEEPING = [Unit(blocks=(fqn,), action="save_ops", save_ops=OPS) for fqn in BLOCKS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "among"),
    [
        ("unet", UNEQUAL),
        ("mlp", [*"1234", ("1", "2"), ("2", "3"), ("3", "4"), ("1", "2", "3"), ("2", "3", "4"), ("1", "2", "3", "4")]),
        ("gpt", [*BLOCKS, BLOCKS[:2], BLOCKS[1:], "blocks.1.mlp"]),
        ("gpt", [*BLOCKS, *KEEPING]),
        ("gpt", [*BLOCKS, *(f"{fqn}.mlp" for fqn in BLOCKS), "blocks.0.attention"]),
    ],
    ids=["unequal blocks, nested", "segments", "segments and parts", "kept results", "equal blocks, nested"],
)
def test_a_plan_is_the_best_of_all_policies(sample: str, among: list[Named]) -> None:
    graph, run = graph_and_run(sample)
    chosen = Planner(run, graph, among=among, seconds=60)
    assert {one.unit.blocks for one in chosen.candidates.units} <= {unit_of(one).blocks for one in among}
    assert len(chosen.candidates.units) == len(among)
    every = every_policy(chosen, run, graph)
    lowest, highest = min(peak for peak, _ in every), chosen.keep_all_bytes
    for share in (0.8, 0.5, 0.2, 0.02, 0.0):
        budget = round(lowest + share * (highest - lowest))
        holds_against(chosen.within(budget), every, budget)
    with pytest.raises(BadInput, match="the least that can be reached is"):
        chosen.within(int(0.9 * lowest))
    floor = chosen.floor()
    assert floor.certificate.bound <= lowest <= floor.step_peak_bytes <= lowest * 1.005
    assert floor.certificate.n_segments == sum(isinstance(unit, tuple) for unit in among)


@pytest.mark.slow
def test_a_run_keeps_the_budget_of_its_plan() -> None:
    _, run = graph_and_run("unet")
    highest, lowest = planner("unet").keep_all_bytes, planner("unet").floor().step_peak_bytes
    plan = planner("unet").within(round(lowest + 0.7 * (highest - lowest)))
    real = measure(msgspec.structs.replace(run.spec, policy=plan.policy, n_repeats=0))
    assert real.step_peak_bytes is not None and plan.budget_bytes is not None
    assert real.step_peak_bytes == pytest.approx(plan.step_peak_bytes, rel=2e-3)
    assert real.step_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("sample", ["unet", "gpt"])
def test_a_plan_says_of_its_policy_what_a_forecast_does(sample: str) -> None:
    forecaster = Forecaster(graph_and_run(sample)[1], graph_and_run(sample)[0])
    for plan in (planner(sample).floor(), planner(sample).least_memory(0.2)):
        foretold = forecaster.forecast(plan.policy)
        assert plan.cost_ratio == pytest.approx(foretold.time_ratio, rel=1e-9) and plan.cost_unit == "ms"
        assert (plan.step_peak_bytes, plan.flop_ratio) == (foretold.step_peak_bytes, foretold.flop_ratio)


def test_no_plan_is_worse_than_the_first_so_many_of_equal_blocks_however_short_the_time() -> None:
    graph, run = graph_and_run("gpt12")
    fresh, forecaster = Planner(run, graph, seconds=1e-9), Forecaster(run, graph)
    place = {one.unit: i for i, one in enumerate(fresh.candidates.units)}
    for n in (1, 6, 12):
        chosen = [place[Unit(blocks=(f"blocks.{i}",))] for i in range(n)]
        peak = forecaster.peak_bytes(fresh.candidates.policy(chosen))
        assert peak is not None
        plan = fresh.within(peak)
        assert plan.extra_cost <= fresh.candidates.cost(tuple(chosen))
        assert plan.certificate.bound <= fresh._program.bound, "nothing is proven of choices that were not searched"


def test_a_solver_that_finds_nothing_in_time_leaves_the_best_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, run = graph_and_run("gpt")
    fresh = Planner(run, graph)
    least = min(peak for peak, _ in fresh.presets())
    monkeypatch.setattr(type(fresh._program), "solve", lambda *_: None)
    monkeypatch.setattr(fresh, "_programs", fresh._programs[-1:])  # without that of every stretch
    floor = fresh.floor()
    assert floor.step_peak_bytes == least and not floor.certificate.bound
    assert fresh.least_memory(0.0).extra_cost == 0
    assert fresh.within(fresh.keep_all_bytes).step_peak_bytes <= fresh.keep_all_bytes


def test_a_legal_choice_names_no_block_twice_where_equal_segments_overlap() -> None:
    graph, run = graph_and_run("gpt12")
    chosen = Planner(run, graph, among=[(f"blocks.{i}", f"blocks.{i + 1}") for i in range(11)])
    legal = chosen._program.variables.legal(range(11))
    assert len(legal) == 6 and is_at_most_nested_once(chosen.candidates.policy(legal))


def test_a_budget_that_nothing_reaches_says_what_can_be_reached() -> None:
    chosen = planner("unet")
    with pytest.raises(BadInput, match=r"below 1 B: the least that can be reached is .* alone hold"):
        chosen.within(1)
    with pytest.raises(BadInput, match=r"blocks? recomputed\. That is held at the .* of backward in .*: .* \(most in "):
        chosen.within(chosen.floor().step_peak_bytes - 2**20)


def test_a_refusal_names_no_least_above_a_known_plan_and_calls_no_least_proven_before_it_is() -> None:
    """Without time the search finds only what it is given."""
    graph, run = graph_and_run("gpt")
    found = planner("gpt").floor()
    without, given = (Planner(run, graph, seconds=0.0) for _ in range(2))
    given.suggest([found.policy])
    for chosen, is_lower in ((without, False), (given, True)):
        least = chosen.floor()
        assert (least.step_peak_bytes <= found.step_peak_bytes) == is_lower and least.certificate.gap > 0.01
        with pytest.raises(BadInput, match=f"the least that was found is {mib(least.step_peak_bytes)};"):
            chosen.within(1024)


def test_one_byte_below_the_floor_two_sizes_are_said() -> None:
    flat = Planner(*reversed(graph_and_run("mlp")), nested=False)
    least = flat.floor().step_peak_bytes
    with pytest.raises(BadInput, match=f"below {least - 1:,} B: the least that can be reached is {least:,} B"):
        flat.within(least - 1)
    with pytest.raises(
        BadInput, match=r"^(No policy|Among \d+ modules?, \d+ segments? of up to \d+ blocks.*, no policy) brings"
    ):
        planner("mlp").within(1)


def test_the_front_goes_down_to_the_floor_and_each_point_is_the_plan_for_its_bytes() -> None:
    graph, run = graph_and_run("mlp")
    fresh = Planner(run, graph, seconds=60, nested=False)  # limits are wall time: no load of the machine decides
    points = list(fresh.front(6, seconds=60))
    assert not points[0].policy.units and points[0].step_peak_bytes == fresh.keep_all_bytes
    peaks = [plan.step_peak_bytes for plan in points]
    assert peaks == sorted(set(peaks), reverse=True) and len(points) > 3
    assert points[-1].step_peak_bytes == fresh.floor().step_peak_bytes, "one least peak"
    for point in points:
        assert point.extra_cost <= fresh.within(point.step_peak_bytes).extra_cost * (1 + 1e-9)


@settings(max_examples=12, deadline=None)
@given(
    st.builds(
        Chain,
        n_blocks=st.integers(1, 6),
        parameters=st.integers(0, 4 * 2**20),
        saved=st.integers(2**16, 16 * 2**20),
        output=st.integers(2**12, 2**20),
        scratch=st.integers(0, 4 * 2**20),
        optimizer=st.booleans(),
    ),
    st.floats(0.3, 1.0),
)
def test_no_policy_of_any_chain_beats_its_plan(chain: Chain, share: float) -> None:
    graph, run = line_of(chain)
    chosen = Planner(run, graph, seconds=60)
    every = every_policy(chosen, run, graph)
    budget = int(share * chosen.keep_all_bytes)
    if any(peak <= budget for peak, _ in every):
        holds_against(chosen.within(budget), every, budget)
    else:
        with pytest.raises(BadInput):
            chosen.within(budget)


def test_a_third_level_is_taken_where_it_pays() -> None:
    graph, run = encoder()
    every = Forecaster(run, graph).peak_bytes(Policy.recompute(one.fqn for one in graph.blocks if one.fqn))
    floor = Planner(run, graph, seconds=60).floor()
    assert every is not None and floor.step_peak_bytes <= every
    assert not is_at_most_nested_once(floor.policy), "two levels do not reach it"
    assert floor.certificate.n_levels == 3 and "(this plan nests 3 levels)" in floor.certificate.scope


def test_a_run_that_was_cut_short_is_no_ground_for_a_plan() -> None:
    graph, run = line_of(Chain())
    with pytest.raises(BadInput, match="complete step with its timeline"):
        Planner(msgspec.structs.replace(run, allocations=None), graph)


def test_a_unit_that_is_struck_off_is_in_no_plan() -> None:
    graph, run = graph_and_run("mlp")
    first = planner("mlp").floor().policy.units
    assert first
    again = Planner(run, graph).without(first)
    assert not set(first) & {one.unit for one in again.candidates.units}
    assert not set(first) & set(again.floor().policy.units)
