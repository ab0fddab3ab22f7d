"""Outcomes of lessons as charts, tables and pages: a missing result is never zero."""

from __future__ import annotations

import msgspec
import pytest

from explorer.lab.cli.gallery import lesson_text
from explorer.lab.plan import lessons
from explorer.lab.record import LabChart, LabFigure, LabOutcome, LabRow, LabSeries
from explorer.lab.view.outcome import NO_RESULT, figure_text, lab_chart, lab_origins, lab_table
from explorer.view.report.html import picture
from tests.view.reports import figures_in


def outcome(kind: str = "bars", unit: str = "") -> LabOutcome:
    rows = (
        LabRow(label="kept", outcome="baseline", figures=(LabFigure(name="loss", value=0.5, origin="measured"),)),
        LabRow(label="reentrant", outcome="raised", note="RuntimeError: no"),
    )
    chart = LabChart(
        kind=kind,  # type: ignore[arg-type]
        title="How wrong?",
        x_title="checkpoint",
        y_title="distance",
        unit=unit,
        x=("kept", "reentrant"),
        series=(LabSeries(name="distance", y=(1024.0**2, None), part="recompute"),),
    )
    return LabOutcome(
        experiment="x", switches={}, device="cpu", rows=rows, chart=chart, findings=("It raised.",), seconds=1.0
    )


def test_a_missing_result_is_said_and_never_drawn_as_zero() -> None:
    bar = lab_chart(outcome()).figure.data[0]
    assert bar.text == ("1,048,576", NO_RESULT) and bar.orientation == "h"
    line = lab_chart(outcome("lines")).figure.data[0]
    assert line.y == (1024.0**2, None)
    assert lab_table(outcome()) == [
        {"run": "kept", "outcome": "baseline", "loss": "0.5", "in its own words": ""},
        {"run": "reentrant", "outcome": "! raised", "loss": "", "in its own words": "RuntimeError: no"},
    ]
    assert lab_origins(outcome()) == {"loss": "measured"} and lab_chart(outcome()).alt == "How wrong? It raised."


@pytest.mark.parametrize(("y", "sentence"), [
    ((0.0, 0.0), "distance: 0 everywhere. The"),
    ((0.0, None), "0 everywhere but for 1 run without a result"),
    ((None, None), "No run gave a result"),
])  # fmt: skip
def test_where_no_bar_has_a_length_a_sentence_says_so(y: tuple[float | None, ...], sentence: str) -> None:
    plain = outcome()
    series = (LabSeries(name="distance", y=y, part="recompute"),)
    chart = lab_chart(msgspec.structs.replace(plain, chart=msgspec.structs.replace(plain.chart, series=series)))
    (note,) = chart.figure.layout.annotations
    assert not chart.figure.data and sentence in note.text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (12, "of 12", "12 of 12"), (0.5, "share", "50.0 %"), (0.0, "", "0"), (2.3e-8, "", "2.3e-08"),
        (3 * 2**20, "bytes", "3.0 MiB"), (None, "bytes", "not measured"), (True, "", "yes"), ("eval", "", "eval"),
        (1048576, "FLOPs", "1.05 MFLOP"),
    ],
)  # fmt: skip
def test_figures_read_like_words(value: bool | int | float | str | None, unit: str, text: str) -> None:
    assert figure_text(LabFigure(name="x", value=value, unit=unit)) == text


def test_a_lesson_is_a_page_and_its_chart_no_script_of_a_stranger() -> None:
    lesson = lessons()[0]
    wild = LabSeries(name="</script><script>alert(1)</script>", y=(1.0, None), part="other")
    switches = {switch.name: switch.default for switch in lesson.switches}
    chart = LabChart(kind="bars", title="a < b & c", x_title="", y_title="n", x=("<b", "q&"), series=(wild, wild))
    wrong = msgspec.structs.replace(outcome(), switches=switches, chart=chart, findings=('say "no"',))
    text = lesson_text(lesson, wrong)
    assert lesson.title in text and "say &quot;no&quot;" in text and "A real run of 1.0 s on cpu." in text
    markup = picture(lab_chart(wrong))
    assert markup.count("<script") == markup.count("</script>") == 1 and len(figures_in(markup)) == 1
