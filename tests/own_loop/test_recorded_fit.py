"""`run.fit(...)` of a recorded step: policies with the figures of its forecasts, and the other levers left out."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.own_loop.record_step import RecordedRun
from explorer.plan import levers
from explorer.plan.memory.next_step import next_step
from explorer.plan.planners.planner import Planner
from explorer.plan.recorded_fit import recorded_fit
from explorer.record import Failure
from explorer.record.card import Card
from tests.own_loop.test_first_step import Adam
from tests.plan.planners.samples import line_of
from tests.view.builders import Chain


@pytest.fixture(scope="module")
def run() -> RecordedRun:
    return Adam().recorded()


def test_rows_have_the_figures_of_the_forecast(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    peak_bytes = next_step(run.measurement).step_peak_bytes or 0
    fit = run.fit(budget=f"{int(0.97 * peak_bytes)} B")
    assert (fit.as_is.step_peak_bytes, fit.as_is.fits) == (peak_bytes, False)
    assert fit.rows and fit.rows[0].step.fits
    for row in fit.rows:
        forecast = run.forecast(row.step.spec.policy)
        assert row.step.step_peak_bytes == forecast.step_peak_bytes < peak_bytes
        assert levers.price(row.step, fit.as_is) == pytest.approx(forecast.flop_ratio)
        assert row.step.fits == (row.step.step_peak_bytes <= (fit.budget_bytes or 0))
        assert row.judgement.effect == "not judged" and "explorer.judge" in row.judgement.reason
    printed = capsys.readouterr().out
    assert "which does not fit in" in printed and "explorer.apply_policy(model, " in printed
    columns = {line.index("not judged") for line in printed.splitlines() if line.startswith("recompute")}
    assert len(columns) == 1, "the table has straight columns"
    assert all(lever.title in printed for lever in levers.LEVERS), "what a record cannot tell is named"


def test_a_card_has_the_figures_of_on_card(run: RecordedRun) -> None:
    fit, memory = run.fit("h100"), run.on_card("h100")
    assert (fit.as_is.reserved_bytes, fit.as_is.allocated_bytes) == (memory.reserved_bytes, memory.allocated_bytes)
    assert fit.as_is.fits and all(row.step.needed_bytes < memory.reserved_bytes for row in fit.rows)


def test_a_share_is_one_of_the_next_step_and_time_is_refused(run: RecordedRun) -> None:
    fit = run.fit(budget="97%")
    assert fit.budget_bytes == int(0.97 * fit.as_is.step_peak_bytes) and not fit.as_is.fits
    with pytest.raises(BadInput, match="limits time"):
        run.fit(budget="+10% time")


CHAIN = Chain(n_blocks=8, saved=16 * 2**20)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.1])
def test_the_first_policy_is_the_cheapest_within_the_budget_or_the_least_peak(share: float) -> None:
    """Of a step that fits, without segments inside segments. A budget of share 0 is below every peak."""
    graph, run = line_of(CHAIN)
    planner, flat = Planner(run, graph), Planner(run, graph, nested=False)
    least, most = planner.floor().step_peak_bytes, planner.keep_all_bytes
    budget = int(least + share * (most - least)) if share else least - 1
    fit = recorded_fit(replace(run, graph=graph, batch=7), None, budget)
    policies = [row.step.spec.policy for row in fit.rows]
    assert len(policies) == len(set(policies)) > 1 and (fit.batch, fit.budget_bytes) == (7, budget)
    expected = flat.floor() if share > 1 else planner.within(budget) if share else planner.floor()
    assert any(len(policy.units) == len(expected.policy.units) for policy in policies)
    assert fit.as_is.fits == (share > 1) and fit.rows[0].step.fits
    if not 0 < share < 1:
        assert expected.policy in policies
    assert all(row.step.fits == (row.step.step_peak_bytes <= budget) for row in fit.rows)


def test_a_plan_that_the_card_refuses_is_made_again() -> None:
    graph, run = line_of(CHAIN)
    planner = Planner(run, graph)
    card = Card(name="small", total_bytes=planner.keep_all_bytes * 3 // 4, taken_bytes=0)
    best, *others = recorded_fit(replace(run, graph=graph), card).rows
    assert best.step.fits and not any(row.step.fits for row in others), "the allocator reserves more than is requested"
    assert len(best.step.spec.policy.units) > len(planner.within(card.total_bytes).policy.units)


def test_a_step_that_was_cut_short_is_refused() -> None:
    graph, run = line_of(CHAIN)
    failure = Failure(kind="out of memory", sentence="It was refused.")
    for broken in (run, replace(run, graph=graph, failure=failure)):
        with pytest.raises(BadInput, match="cut short"):
            recorded_fit(broken, None)
