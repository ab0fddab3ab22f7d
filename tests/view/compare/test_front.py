"""Foretold and measured points are told apart without colour; the answer is read off the marks."""

from __future__ import annotations

from dataclasses import replace

from explorer.record import Policy
from explorer.view.compare.front import Mark, front_chart
from explorer.view.drawing.units import MIB

SOME, ALL = Policy.recompute(["a"]), Policy.recompute(["a", "b"])
MARKS = (
    Mark(kind="plan", policy=ALL, peak_bytes=40 * MIB, time_ratio=1.4),
    Mark(kind="plan", policy=SOME, peak_bytes=70 * MIB, time_ratio=1.1),
    Mark(kind="plan", policy=Policy(), peak_bytes=100 * MIB, time_ratio=1.0),
    Mark(kind="preset", policy=ALL, peak_bytes=41 * MIB, time_ratio=1.4, name="Recompute all"),
    Mark(kind="run", policy=SOME, peak_bytes=71 * MIB, time_ratio=1.12, spread=0.02, measured=True),
    Mark(kind="drawn", policy=SOME, peak_bytes=71 * MIB, time_ratio=1.12, spread=0.02, measured=True),
)


def test_every_kind_has_a_symbol_of_its_own() -> None:
    traces = front_chart(MARKS).figure.data
    assert len({trace.marker.symbol for trace in traces}) == len({trace.name for trace in traces}) == 4
    assert [place for trace in traces for place, *_ in trace.customdata] == list(range(len(MARKS)))
    (run,) = [trace for trace in traces if trace.name == "runs, measured"]
    assert list(run.error_y.array) == [0.02] and "measured" in run.customdata[0][2]
    assert "open" not in run.marker.symbol


def test_the_answer_is_about_the_budget() -> None:
    assert "from 100.0 MiB down to 40.0 MiB for ×1.40 time, predicted" in front_chart(MARKS).alt
    within = front_chart(MARKS, budget_bytes=80 * MIB)
    assert "within 80.0 MiB: 70.0 MiB for ×1.10 time, predicted" in within.alt
    assert "budget 80.0 MiB" in [note.text for note in within.figure.layout.annotations]
    assert not front_chart(MARKS, budget_bytes=2**40).figure.layout.shapes, "a budget far away would squeeze the rest"


def test_a_step_that_nobody_timed_is_not_drawn_against_time() -> None:
    marks = [replace(mark, counts="FLOPs") for mark in MARKS[:4]]
    chart = front_chart(marks)
    assert "FLOPs" in chart.figure.layout.yaxis.title.text and "step time" not in chart.figure.layout.yaxis.title.text
    assert "step time" not in chart.alt and "for ×1.40 FLOPs, predicted" in chart.alt
    assert "FLOPs (× everything kept)" in chart.rows()[0] and "×1.40 FLOPs" in chart.figure.data[0].customdata[0][2]
    assert front_chart(MARKS).figure.layout.yaxis.title.text == "step time, × everything kept"


def test_the_table_has_every_mark_and_its_origin() -> None:
    rows = front_chart(MARKS).rows()
    assert [row["origin"] for row in rows] == ["predicted"] * 4 + ["measured"] * 2
    assert rows[4]["±"] == 0.02 and rows[3]["what"] == "Recompute all"
    assert front_chart(()).figure.layout.title.text
