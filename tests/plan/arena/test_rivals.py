"""What each rival chooses on measured steps: within the budget by the forecast, and never cheaper than this planner."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from explorer.engine.measure.measure import measure
from explorer.engine.model.describe import describe
from explorer.errors import BadInput
from explorer.plan.arena.rival import Situation
from explorer.plan.arena.table import OURS, rivals
from explorer.record import ModelRef, Policy, RunSpec

SHARES = (0.6, 0.75, 0.9)
MODELS = {
    "gpt": {"n_layers": 4, "batch": 2},
    "mlp": {},
    "unet": {"batch": 2},
}
PLANNERS = [name for name, rival in rivals().items() if rival.choose and rival.takes_budget and name != "ckptplan"]


@cache
def situation(sample: str) -> Situation:
    model = ModelRef(target=f"sample_models/{sample}.py", size="small", arguments=dict(MODELS[sample]))
    return Situation(measure(RunSpec(model=model, n_repeats=1)), describe(model))


def choice(name: str, sample: str, share: float) -> Policy | None:
    choose, case = rivals()[name].choose, situation(sample)
    assert choose is not None
    try:
        return choose(case, int(share * case.keep_all_bytes))
    except BadInput as error:
        assert error.sentence.endswith(".")
        return None


@pytest.mark.slow
@pytest.mark.parametrize("sample", MODELS)
@pytest.mark.parametrize("name", PLANNERS)
def test_what_is_chosen_fits_by_the_forecast(name: str, sample: str) -> None:
    """Rotor alone does not ask the forecast: it has a model of its own."""
    case = situation(sample)
    for share in SHARES:
        policy = choice(name, sample, share)
        if policy is not None and name != "rotor":
            peak = case.peak_of(policy)
            assert peak is not None and peak <= share * case.keep_all_bytes


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["gpt", "unet"])
def test_no_rival_with_whole_blocks_is_cheaper_by_the_forecast(sample: str) -> None:
    case = situation(sample)
    places = {one.unit: i for i, one in enumerate(case.planner.candidates.units)}

    def cost(policy: Policy) -> float:
        return case.planner.cost_of([places[unit] for unit in policy.units])

    for name, share in itertools.product(("every-k", "greedy"), SHARES):
        theirs, ours = choice(name, sample, share), choice(OURS, sample, share)
        assert theirs is None or (ours is not None and cost(ours) <= cost(theirs) + 1e-6)


def test_greedy_takes_the_fewest_of_its_order() -> None:
    case = situation("gpt")
    policy = choice("greedy", "gpt", 0.8)
    assert policy is not None and policy.units
    order = sorted(case.units, key=lambda unit: case.saved_bytes(unit) / case.forward_ms(unit), reverse=True)
    taken = {unit.blocks for unit in policy.units}
    assert taken == set(order[: len(taken)])
    less = Policy.recompute(unit[0] for unit in order[: len(taken) - 1])
    assert (case.peak_of(less) or 0) > 0.8 * case.keep_all_bytes


def test_the_best_number_of_segments_is_the_best_of_all() -> None:
    case, share = situation("mlp"), 0.75
    found = choice("checkpoint-sequential", "mlp", share)
    assert found is not None
    blocks = [fqn for unit in case.units for fqn in unit]
    every = []
    for n_segments in range(1, len(blocks) + 1):
        size = len(blocks) // n_segments
        every.append(case.segments(tuple(blocks[i * size : (i + 1) * size]) for i in range(n_segments - 1)))
    fitting = [policy for policy in every if (case.peak_of(policy) or 0) <= share * case.keep_all_bytes]
    assert found in fitting
    ratios = [case.forecaster.forecast(policy).time_ratio for policy in fitting]
    assert case.forecaster.forecast(found).time_ratio == min(ratio for ratio in ratios if ratio is not None)


def test_what_cannot_plan_here_says_why() -> None:
    for name, words in (("rotor", "chains"), ("checkpoint-sequential", "no segments"), ("ckptplan", "CUDA")):
        choose = rivals()[name].choose
        assert choose is not None
        with pytest.raises(BadInput, match=words):
            choose(situation("unet"), situation("unet").keep_all_bytes)
