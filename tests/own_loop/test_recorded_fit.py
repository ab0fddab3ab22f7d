"""`run.fit(...)` of a recorded step: policies with the figures of its forecasts, and the other levers left out."""

from __future__ import annotations

import pytest

from explorer.errors import BadInput
from explorer.own_loop.record_step import RecordedRun
from explorer.plan import levers
from explorer.plan.memory.next_step import next_step
from tests.own_loop.test_first_step import Adam


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
