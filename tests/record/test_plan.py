"""Plans, forecasts and pipeline runs."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.record import GradientDiff, ModelRef, PipelinePlan, Policy, RunSpec
from explorer.record.pipeline import (
    ActionTime,
    GradientShares,
    PipelineRun,
    PlayedSchedule,
    RankMemory,
    RankUse,
)
from explorer.record.plan import AutoPlan, Certificate, JointPlan, Plan, Price
from tests.view.builders import HOST


def certificate(gap: float, n_candidates: int = 24, n_solves: int = 3) -> Certificate:
    return Certificate(bound=1.0, gap=gap, n_candidates=n_candidates, n_rows=7, n_solves=n_solves)


def test_a_sentence_names_what_could_be_chosen_and_how_deep_it_nests() -> None:
    chain = replace(certificate(0.0, 497), n_segments=496, longest_segment=32, inside_segments=False)
    assert chain.scope == "1 module and 496 segments of up to 32 blocks, nothing inside a segment"
    assert chain.scope in str(chain)
    both = replace(chain, inside_segments=True, beside=chain.scope)
    assert both.scope == "1 module and 496 segments of up to 32 blocks", "the other choices are among these"
    assert (
        replace(both, n_candidates=498).scope
        == f"2 modules{both.scope[8:]}, at most one inside another, or {chain.scope}"
    )
    deep = replace(certificate(0.0), n_levels=3)
    assert deep.scope == "24 modules, at most one inside another (this plan nests 3 levels)"


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


MEMORY = RankMemory.of(
    1, "measured", [(0, 10, ""), (5, 40, "1F0"), (7, 40, "1B0"), (9, 12, "")], parameter_bytes=10, receive_bytes=2
)


def test_the_peak_of_a_rank_is_its_first_highest_sample() -> None:
    assert (MEMORY.peak_bytes, MEMORY.peak_action, MEMORY.actions) == (40, "1F0", ("1F0", "1B0"))
    assert list(MEMORY.action) == [-1, 0, 1, -1]
    assert replace(MEMORY, optimizer_bytes=5).device_bytes == 45
    nothing = RankMemory.of(0, "measured", [], parameter_bytes=0, receive_bytes=0)
    assert (nothing.peak_bytes, nothing.device_bytes, nothing.peak_action) == (None, None, "")


def test_a_played_schedule_is_as_long_as_its_last_action_and_as_idle_as_its_ranks() -> None:
    action = ActionTime(rank=0, stage=2, kind="B", microbatch=3, start_ms=1.0, end_ms=4.5)
    uses = tuple(RankUse(rank=k, busy_ms=1.0, bubble_fraction=f, n_in_flight=1) for k, f in enumerate((0.2, 0.4)))
    played = PlayedSchedule(origin="simulated", actions=(action,), ranks=uses)
    assert (action.name, action.duration_ms) == ("2B3", 3.5)
    assert (played.makespan_ms, played.bubble_fraction) == (4.5, pytest.approx(0.3))
    assert PlayedSchedule(origin="simulated", actions=(), ranks=()).makespan_ms == 0.0


def shares(name: str, verdict: str) -> GradientShares:
    equal = GradientDiff(name=name, shape=(2,), dtype="float32", presence="both", bitwise=True)
    errors = {"bitwise equal": None, "rounding": 1e-7, "different": 1.0}
    split = replace(equal, bitwise=verdict == "bitwise equal", baseline_error=1e-7, candidate_error=errors[verdict])
    assert split.verdict == verdict
    return GradientShares(name=name, stages=(0,), microbatching=equal, recompute=equal, splitting=split)


def test_gradients_are_counted_by_what_splitting_did() -> None:
    run = PipelineRun(
        spec=RunSpec(model=ModelRef(target="a.py")), engine="inproc", environment=HOST, rows=(), memory=(MEMORY,),
        gradients=tuple(shares(*one) for one in (("a", "bitwise equal"), ("b", "rounding"), ("c", "different"))),
    )  # fmt: skip
    headlines = run.headlines()
    assert [headlines[f"n_splitting_{word}"] for word in ("equal", "rounding", "different")] == [1, 1, 1]
    assert [one.name for one in run.moved] == ["c"] and headlines["n_gradients"] == 3
    assert run.fullest_bytes == 40 and replace(run, memory=()).fullest_bytes is None
    assert (
        headlines["rank_peak_bytes"] == [40]
        and headlines["makespan_ms"] is None
        and headlines["highest_multiplier"] is None
    )
