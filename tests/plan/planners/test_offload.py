"""Keep, recompute or offload in one program: a plan is the best of all choices by hand, and says its interval."""

from __future__ import annotations

import itertools
import random

import pytest
from msgspec.structs import replace

from explorer.engine.bench.measure import measure_without_data
from explorer.engine.model.describe import describe
from explorer.plan.planners.planner import Planner
from explorer.plan.policy.counted import offloading
from explorer.plan.predict.forecaster import Forecaster
from explorer.plan.predict.not_predicted import not_covered
from explorer.record import Measurement, ModelGraph, Policy, RunSpec, Unit
from explorer.record.measurement import Samples, Times
from tests.zoo import sample


@pytest.fixture(scope="module", params=["gpt", "resnet", "mlp"])
def step(request: pytest.FixtureRequest) -> tuple[ModelGraph, Measurement]:
    model = sample(request.param)
    run = measure_without_data(RunSpec(model=model))
    timed = Samples(ms=(8.0,))
    blocks = tuple(replace(block, forward=Samples(ms=(block.forward_flops / 1e6 + 0.01,))) for block in run.blocks)
    times = Times(clock="process CPU time", step=timed, forward=timed, backward=timed, checkpoint_ms=0.05)
    return describe(model), replace(run, times=times, blocks=blocks)


@pytest.mark.parametrize("bandwidth", [1e5, 2e8, 1e12])
def test_a_plan_is_the_best_of_all_choices(step: tuple[ModelGraph, Measurement], bandwidth: float) -> None:
    """Blocks alone, so that all 3^n choices can be forecast one by one."""
    graph, run = step
    names = [unit.blocks[0] for unit in offloading(graph)][:4]
    planner = Planner(run, graph, among=names).with_offload(bandwidth)
    units, cost = planner.candidates.number, planner.candidates.cost
    choices = []
    for actions in itertools.product(("keep", "recompute", "offload"), repeat=len(names)):
        chosen = [Unit(blocks=(name,), action=action) for name, action in zip(names, actions) if action != "keep"]
        if set(chosen) <= units.keys():
            peak = Forecaster(run, graph).peak_bytes(Policy(units=tuple(chosen)))
            choices.append((peak, cost(tuple(sorted(units[unit] for unit in chosen)))))
    least = min(peak for peak, _ in choices)
    for share in (0.0, 0.3, 0.7):
        budget = round(least + share * (planner.keep_all_bytes - least))
        plan = Planner(run, graph, among=names).with_offload(bandwidth).within(budget)
        best = min(price for peak, price in choices if peak <= budget)
        assert plan.step_peak_bytes <= budget and plan.extra_cost >= plan.certificate.bound * (1 - 1e-9)
        assert plan.extra_cost == pytest.approx(best, rel=2e-3), (share, plan.policy)


def test_no_choice_that_is_judged_nests_an_offloaded_block(step: tuple[ModelGraph, Measurement]) -> None:
    """A container of blocks is a candidate too: its recompute and a block inside it that is offloaded exclude each
    other, in first solutions and in a third level of nesting."""
    graph, run = step
    planner = Planner(run, graph).with_offload(1e12)
    candidates, variables = planner.candidates, planner._program.variables
    draw = random.Random(0)
    choices = [variables.legal(draw.sample(range(variables.n_units), variables.n_units)) for _ in range(30)]
    choices += [[*chosen, *more] for chosen in choices[:5] for more in variables.third_levels(tuple(chosen))]
    for chosen in choices:
        assert not not_covered(candidates.policy(chosen), run)
    assert all(plan.step_peak_bytes for plan in planner.front())
