"""Plans: their certificate in words, what real steps say of them, and the price of one block."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.record.plan import AutoPlan, Certificate, JointPlan, Plan, Price
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan


def certificate(gap: float, n_candidates: int = 24, n_solves: int = 3) -> Certificate:
    return Certificate(bound=1.0, gap=gap, n_candidates=n_candidates, n_rows=7, n_solves=n_solves)


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (0.0, "proven the best choice among 24 modules, at most one inside another, in 3 solves"),
        (0.001, "within 0.1 % of the best choice among 24 modules, at most one inside another, in 3 solves"),
        (1.0, "the best that was found among 24 modules, at most one inside another, in 3 solves; nothing is proven"),
    ],
)
def test_a_script_prints_a_sentence(gap: float, words: str) -> None:
    assert str(certificate(gap)) == words


def test_one_is_one() -> None:
    assert str(certificate(0.0, 1, 1)) == "proven the best choice among 1 module, in 1 solve"


def test_a_sentence_names_what_could_be_chosen_and_how_deep_it_nests() -> None:
    chain = replace(certificate(0.0, 497), n_segments=496, longest_segment=32, inside_segments=False)
    assert chain.scope == "1 module and 496 segments of up to 32 blocks, nothing inside a segment"
    assert chain.scope in str(chain)


@given(st.floats(min_value=1e-9, max_value=0.99))
def test_the_gap_is_never_said_smaller_than_it_is(gap: float) -> None:
    told = re.match(r"within ([\d.]+) %", str(certificate(gap)))
    assert told is not None and gap <= float(told[1]) / 100 * (1 + 1e-12) <= gap + 1.1e-4


PLAN = Plan(
    policy=Policy(), step_peak_bytes=80, baseline_step_peak_bytes=100, extra_cost=25.0, step_cost=100.0,
    cost_unit="ms", certificate=certificate(0.0),
)  # fmt: skip


def test_the_cost_ratio() -> None:
    assert PLAN.cost_ratio == 1.25 and replace(PLAN, step_cost=0.0).cost_ratio is None


@pytest.mark.parametrize(("gap", "proven"), [(0.0, True), (1e-3, True), (2e-3, False)])
def test_proven_is_within_a_thousandth(gap: float, proven: bool) -> None:
    assert replace(PLAN, certificate=certificate(gap)).proven == proven


@pytest.mark.parametrize(("makespan", "bound", "gap"), [(10.0, 8.0, 0.2), (10.0, 11.0, 0.0), (0.0, 0.0, 0.0)])
def test_a_joint_plan_lies_above_its_bound(makespan: float, bound: float, gap: float) -> None:
    joint = JointPlan(
        plan=PipelinePlan(stages=(("a",),), n_microbatches=1), policy=Policy(), cap_bytes=1, makespan_ms=makespan,
        rank_bytes=(1,), cuts_first_ms=None, n_judged=1, bound_ms=bound,
    )  # fmt: skip
    assert joint.gap == pytest.approx(gap)


@pytest.mark.parametrize(
    ("budget", "measured", "kept"), [(100, 100, True), (100, 101, False), (100, None, False), (None, 10**12, True)]
)
def test_kept_is_measured(budget: int | None, measured: int | None, kept: bool) -> None:
    auto = AutoPlan(plan=replace(PLAN, budget_bytes=budget), measured_peak_bytes=measured, n_steps=3)
    assert auto.kept == kept
    first = str(auto).splitlines()[0]
    if kept:
        assert auto.require() is auto and "budget" not in str(auto)
    else:
        assert "budget of 100 bytes" in first and ("no peak" in first if measured is None else "101, 1 more" in first)
        with pytest.raises(BadInput, match="budget of 100 bytes"):
            auto.require()
    assert (auto.policy, auto.certificate) == (PLAN.policy, PLAN.certificate)
    assert (auto.predicted_peak_bytes, auto.predicted_time_ratio) == (80, 1.25)


def test_without_flops_a_price_has_no_rate() -> None:
    free = Price(blocks=("a",), toggle="recompute", peak_bytes=1, peak_change_bytes=-1, share_of_step_flops=None)
    assert free.mib_per_percent is None


@pytest.mark.parametrize(("toggle", "change", "rate"), [("recompute", -50, 10.0), ("keep", 50, 10.0), ("keep", 0, 0.0)])
def test_the_rate_is_positive_whichever_way_the_toggle_goes(toggle: str, change: int, rate: float) -> None:
    price = Price(
        blocks=("a",), toggle=toggle, peak_bytes=1, peak_change_bytes=change * 2**20, share_of_step_flops=0.05
    )
    assert price.mib_per_percent == pytest.approx(rate)
