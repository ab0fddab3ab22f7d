"""What each rival chooses on measured steps: within the budget by the forecast, and never cheaper than this planner."""

from __future__ import annotations

import itertools

import pytest

from explorer.plan.arena.table import OURS, rivals
from explorer.record import Policy
from tests.plan.arena.situations import MODELS, SHARES, choice, situation

PLANNERS = [name for name, rival in rivals().items() if rival.choose and rival.takes_budget and name != "ckptplan"]


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
