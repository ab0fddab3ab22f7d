"""The arena: every planner takes part on a chain, and who stands behind is judged by budget, gradients and steps."""

from __future__ import annotations

import math

import pytest

from benchmarks.arena import OURS, PLANNERS, Trial, ratio_interval, standing, trials
from explorer.record import ModelRef, RunSpec
from explorer.record.measurement import Samples
from explorer.record.policy import Policy

SMALL = {"n_layers": 6, "width": 16, "batch": 256, "dropout": 0.0}


@pytest.mark.slow
def test_every_planner_runs_on_a_chain_with_equal_gradients() -> None:
    spec = RunSpec(model=ModelRef(target="sample_models/mlp.py", arguments=SMALL), n_repeats=2)
    keep_all, results = trials(spec, (0.9,), list(PLANNERS), 2)
    assert len(keep_all.ms) == 2 and {trial.planner for trial in results} == set(PLANNERS)
    ran = [trial for trial in results if trial.policy is not None]
    assert {OURS, "greedy", "rotor"} <= {trial.planner for trial in ran}
    assert {trial.verdict for trial in ran} == {"bitwise equal"}
    for trial in ran:
        assert trial.peak_bytes == pytest.approx(trial.predicted_bytes, rel=0.001)
        assert len(trial.steps.ms) == 2


def trial(policy: str, ms: float, peak: int = 8, verdict: str = "bitwise equal") -> Trial:
    steps = Samples(ms=tuple(ms + 0.01 * i for i in range(9)))
    return Trial("x", 0.5, 10, Policy.recompute([policy]), peak_bytes=peak, verdict=verdict, steps=steps)


def test_a_rival_beats_only_within_the_budget_with_equal_gradients_and_beyond_doubt() -> None:
    mine = trial("a", 10.0)
    assert standing(mine, trial("b", 9.0)) == "beaten"
    assert standing(mine, trial("b", 11.0)) == "ahead"
    assert standing(mine, trial("a", 9.0)) == "ahead", "the same policy"
    assert standing(mine, trial("b", 9.0, peak=11)) == "ahead", "over the budget"
    assert standing(mine, trial("b", 9.0, verdict="different")) == "ahead"
    assert standing(trial("a", 10.0, peak=11), trial("b", 12.0)) == "beaten"
    few = trial("b", 9.0)
    few.steps = Samples(ms=few.steps.ms[:4])
    assert standing(mine, few) == "undecided"


@pytest.mark.parametrize("n", [6, 8, 9, 12, 15, 50])
def test_an_interval_of_ratios_ends_where_the_sign_test_would_begin_to_doubt(n: int) -> None:
    interval = ratio_interval(Samples(ms=tuple(float(i) for i in range(n, 0, -1))), Samples(ms=(1.0,) * n), 0.95)
    assert interval is not None
    k = round(interval[0])
    assert interval == (k, n + 1 - k)
    doubt = [sum(math.comb(n, heads) for heads in range(most + 1)) / 2 ** (n - 1) for most in (k - 1, k)]
    assert doubt[0] <= 0.05 < doubt[1], "two-sided sign test"


def test_five_pairs_bound_nothing() -> None:
    assert ratio_interval(Samples(ms=(1.0,) * 5), Samples(ms=(1.0,) * 5), 0.95) is None
    assert ratio_interval(Samples(), Samples(), 0.95) is None
