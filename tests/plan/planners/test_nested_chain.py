"""Segments inside segments: the recursion is held against Revolve's, plans against forecasts of every nesting."""

from __future__ import annotations

import itertools
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


MOST, TAPE = 64, 80  # grains of a block's backward: no two fit, as Revolve has it


@pytest.mark.parametrize("equal", [True, False])
def test_a_rerun_costs_what_revolve_costs_for_every_length_and_number_of_slots(*, equal: bool) -> None:
    most = MOST if equal else 10
    table = Revolve(
        forward=[1.0] * most, block_grains=[TAPE] * most, input=[1] * most, n_grains=TAPE + MOST + 1, equal=equal
    )
    for n, n_slots in itertools.product(range(1, most + 1), range(1, MOST)):
        assert table.again(0, n).cost[TAPE + n_slots] == revolve(n, n_slots), (n, n_slots)


@pytest.mark.parametrize("n_blocks", [4, 13, 33, MOST])
def test_a_plan_of_an_equal_chain_runs_as_much_again_as_revolve_for_every_number_of_slots(n_blocks: int) -> None:
    graph, run = chain_of([Size(saved=TAPE * MIB, output=MIB)] * n_blocks)
    run = replace(run, times=None, blocks=tuple(replace(block, forward=Samples()) for block in run.blocks))
    planner, forecaster, n = Planner(run, graph), Forecaster(run, graph), n_blocks
    table = Revolve(forward=[1.0] * n, block_grains=[TAPE] * n, input=[1] * n, n_grains=TAPE + n, equal=True)
    for n_slots in range(1, n):
        peak_bytes = forecaster.peak_bytes(policy_of(table.segments(TAPE + n_slots))) or 0
        plan = planner.within(peak_bytes)
        assert plan.extra_cost == pytest.approx(100 * (revolve(n, n_slots) - n)), n_slots
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
