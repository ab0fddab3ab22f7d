"""Bars of the ledger add up to the bytes held."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from explorer.plan.memory.ledger import ledger
from explorer.record import Measurement
from explorer.view.memory.ledger import ledger_chart, place
from tests.view.builders import MIB, Chain, measured, runs


@settings(max_examples=12, deadline=None)
@given(runs())
def test_all_bars_and_the_table_add_up_to_the_peak(run: Measurement) -> None:
    at_peak = ledger(run)
    fig = ledger_chart(at_peak).figure
    unit = {"KiB": 1024, "MiB": MIB, "GiB": 1024 * MIB}[fig.layout.xaxis.title.text[-4:-1]]
    assert round(sum(sum(bar.x) for bar in fig.data) * unit) == run.step_peak_bytes
    assert sum(row["bytes"] for row in ledger_chart(at_peak).rows()) == run.step_peak_bytes


def test_rows_follow_the_module_not_the_alphabet() -> None:
    run = measured(Chain(n_blocks=12))
    expected = [f"layers.{i}" for i in range(12)]
    assert [y for y in ledger_chart(ledger(run)).figure.data[0].y if y in expected] == expected


def test_the_title_says_where_the_peak_is() -> None:
    at_peak = ledger(measured(recompute=range(6)))
    title = ledger_chart(at_peak).figure.layout.title
    assert title.text == "What is alive at the peak?"
    assert title.subtitle.text == "90.0 MiB, 67 % into recompute of layers.0"
    assert "90.0 MiB in all" in ledger_chart(at_peak).alt


def test_another_moment_is_named() -> None:
    run = measured()
    early = ledger(run, 0)
    assert ledger_chart(early).figure.layout.title.text == "What is alive at event 0?"
    assert place(early) == "at event 0"


def test_clicks_find_their_blocks() -> None:
    for bar in ledger_chart(ledger(measured())).figure.data:
        for label, custom in zip(bar.y, bar.customdata):
            assert custom[0] == ("" if label == "(model itself)" else label)


@pytest.mark.parametrize("n_blocks", [200, 1000])
def test_many_blocks_stay_readable(n_blocks: int) -> None:
    fig = ledger_chart(ledger(measured(Chain(n_blocks=n_blocks))), [f"layers.{i}" for i in range(n_blocks)]).figure
    assert len(fig.data[0].y) <= 26
    assert fig.layout.height < 1000
