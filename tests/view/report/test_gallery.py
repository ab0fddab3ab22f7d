"""The gallery: a lesson with its run, and a first page that leads to every other."""

from __future__ import annotations

from explorer.plan.lessons import lessons
from explorer.record.lab import LabChart, LabOutcome, LabSeries
from explorer.view.report.gallery import Exhibit, index_text, lesson_text


def test_a_lesson_and_the_first_page_of_the_gallery() -> None:
    lesson = lessons()[0]
    chart = LabChart(
        kind="bars", title="How far?", x_title="", y_title="n", x=("a",), series=(LabSeries(name="s", y=(1.0,)),)
    )
    outcome = LabOutcome(
        experiment=lesson.name, switches={switch.name: switch.default for switch in lesson.switches}, device="cpu",
        rows=(), chart=chart, findings=("All is well.",), seconds=1.0,
    )  # fmt: skip
    text = lesson_text(lesson, outcome)
    assert lesson.title in text and "All is well." in text and "A real run of 1.0 s on cpu." in text
    index = index_text([Exhibit(file="a b.html", title="A <b>", line="what", shelf="Traps")])
    assert 'href="a b.html"' in index and "A &lt;b&gt;" in index and "<h2>Traps</h2>" in index
