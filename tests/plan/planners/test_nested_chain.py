"""Segments inside segments: the recursion is held against Revolve's, plans against forecasts of every nesting."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache

import pytest
from msgspec.structs import replace

from explorer.engine.bench.measure import measure
from explorer.engine.model.describe import describe
from explorer.errors import BadInput
from explorer.plan.planners.nested_chain import Revolve
from explorer.plan.planners.planner import Planner
from explorer.plan.policy.file import dumps, file_of, loads
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import ModelRef, RunSpec, Samples
from tests.engine.bench import test_segments_inside
from tests.plan.planners.test_chain import Size, chain_of, policy_of
from tests.view.builders import MIB


@cache
def revolve(n_blocks: int, n_slots: int) -> int:
    """Forward runs of blocks that the optimal schedule takes, by Griewank and Walther's recursion.

    `Revolve` of checkpoint-schedules 1.0.4 takes as many for all 2,016 pairs of up to 64 blocks and fewer slots.
    """
    if n_blocks == 1:
        return 1
    if n_slots == 1:
        return n_blocks * (n_blocks + 1) // 2
    return min(k + revolve(n_blocks - k, n_slots - 1) + revolve(k, n_slots) for k in range(1, n_blocks))


def schedule(first: int, n_blocks: int, n_slots: int) -> Iterator[tuple[int, int]]:
    """First and end of the segments of an optimal schedule, outer ones first."""
    while n_blocks > 1:
        runs = {k: k + revolve(n_blocks - k, max(n_slots - 1, 1)) + revolve(k, n_slots) for k in range(1, n_blocks)}
        length = n_blocks - 1 if n_slots == 1 else min(runs, key=runs.__getitem__)
        yield first, first + length
        yield from schedule(first, length, n_slots)
        first, n_blocks, n_slots = first + length, n_blocks - length, n_slots - 1


MOST, TAPE = 64, 80  # grains of a block's backward: no two fit, as Revolve has it


@pytest.mark.parametrize("equal", [True, False])
def test_a_rerun_costs_what_revolve_costs_for_every_length_and_number_of_slots(*, equal: bool) -> None:
    most = MOST if equal else 10
    table = Revolve(forward=[1.0] * most, kept=[TAPE] * most, input=[1] * most, n_grains=TAPE + MOST + 1, equal=equal)
    for n, n_slots in itertools.product(range(1, most + 1), range(1, MOST)):
        assert table.again(0, n).cost[TAPE + n_slots] == revolve(n, n_slots), (n, n_slots)


@pytest.mark.parametrize("n_blocks", [4, 13, 33, MOST])
def test_a_plan_of_an_equal_chain_runs_as_much_again_as_revolve_for_every_number_of_slots(n_blocks: int) -> None:
    graph, run = chain_of([Size(saved=TAPE * MIB, output=MIB)] * n_blocks)
    untimed = tuple(replace(block, forward=Samples()) for block in run.blocks)
    run = replace(run, times=None, blocks=untimed)
    planner, forecaster = Planner(run, graph), Forecaster(run, graph)
    for n_slots in range(1, n_blocks):
        forecast = forecaster.forecast(policy_of(list(schedule(0, n_blocks, n_slots))))
        assert forecast.step_peak_bytes is not None
        plan = planner.within(forecast.step_peak_bytes)
        assert plan.extra_cost == pytest.approx(100 * (revolve(n_blocks, n_slots) - n_blocks)), n_slots
    with pytest.raises(BadInput, match=r"^Among .* no policy"):
        planner.within(planner.floor().step_peak_bytes - 1)


def test_a_nested_plan_reaches_less_than_any_flat_one_and_its_run_holds_it() -> None:
    model = ModelRef(target=f"{test_segments_inside.__file__}:sequential")
    run, graph = measure(RunSpec(model=model, n_repeats=0, optimizer="sgd")), describe(model)
    planner, flat = Planner(run, graph), Planner(run, graph, nested=False)
    least = flat.floor().step_peak_bytes
    assert planner.floor().step_peak_bytes < least and planner.floor().certificate.n_levels > 2
    certificate = str(planner.floor().certificate)
    assert "nothing inside a segment" not in certificate and certificate.endswith("nothing is proven")
    for budget in ((least + planner.floor().step_peak_bytes) // 2, least, 2 * least):
        plan = planner.within(budget)
        held = measure(replace(run.spec, policy=plan.policy))
        assert held.failure is None and held.step_peak_bytes == plan.step_peak_bytes <= budget
        assert plan.flop_ratio is not None and held.total_flops == round(plan.flop_ratio * (run.total_flops or 0))
        if budget >= least:
            assert plan.extra_cost <= flat.within(budget).extra_cost * (1 + 1e-9)
    assert all(len(point.policy.units) == 0 or point.certificate.n_levels == 2 for point in planner.front())
    policy = planner.floor().policy
    assert loads(dumps(file_of(policy, graph))).policy == policy, "a policy file keeps the nesting"
