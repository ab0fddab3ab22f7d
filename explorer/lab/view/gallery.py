"""A lesson as a page of the gallery."""

from __future__ import annotations

from html import escape

from explorer.lab.record import LabOutcome, Lesson
from explorer.lab.view.outcome import lab_chart, lab_table
from explorer.view.report.html import box, document, paragraph, picture, section, table


def lesson_text(lesson: Lesson, outcome: LabOutcome) -> str:
    """A lesson with the outcome of one run."""
    switches = [
        {"switch": switch.question, "stood at": switch.label(outcome.switches[switch.name])}
        for switch in lesson.switches
    ]
    shown = [picture(lab_chart(outcome)), table(lab_table(outcome))]
    body = [
        '<nav><a href="index.html">All pages</a></nav>',
        f"<h1>{escape(lesson.title)}</h1>",
        paragraph(lesson.question, "quiet"),
        section("Story", [*map(paragraph, lesson.paragraphs), table(switches) if switches else ""]),
        section("What a run showed", [*shown, box(outcome.findings)]),
        paragraph(f"A real run of {outcome.seconds:.1f} s on {outcome.device}.", "quiet"),
    ]
    return document(lesson.title, body, share_plotly=True)
