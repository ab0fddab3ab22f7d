"""Switches, rows and figures are found by their names; what is not there says what is."""

from __future__ import annotations

import pytest

from explorer.record.lab import Choice, LabChart, LabFigure, LabOutcome, LabRow, Switch

SWITCH = Switch(name="mode", question="?", choices=(Choice(value="on", label="Yes"), Choice(value="off", label="No")))
ROW = LabRow(label="plain", outcome="baseline", figures=(LabFigure(name="peak", value=0, unit="bytes"),))


def test_the_first_choice_is_the_default() -> None:
    assert (SWITCH.default, SWITCH.values, SWITCH.label("off")) == ("on", ("on", "off"), "No")
    with pytest.raises(StopIteration):
        SWITCH.label("perhaps")


def test_zero_is_a_value_and_a_figure_that_is_not_there_is_none() -> None:
    assert ROW.value("peak") == 0 and ROW.value("time") is None


def test_a_row_that_is_not_there_names_those_that_are() -> None:
    chart = LabChart(kind="bars", title="", x_title="", y_title="", x=(), series=())
    outcome = LabOutcome(experiment="x", switches={}, device="cpu", rows=(ROW,), chart=chart, findings=(), seconds=0.0)
    assert outcome.row("plain") is ROW
    with pytest.raises(KeyError, match="'other' is not among .*plain"):
        outcome.row("other")
