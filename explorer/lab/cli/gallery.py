"""The lessons as pages of `checkpoint-explorer gallery`; every lesson is run."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from explorer.cli.command import say
from explorer.cli.worker import ask
from explorer.jobs import run_file
from explorer.jobs.client import Worker
from explorer.lab.jobs import RunLab
from explorer.lab.plan import lessons
from explorer.lab.record import LabOutcome, Lesson
from explorer.lab.view.outcome import lab_chart, lab_table
from explorer.view.report.explorable import Exhibit
from explorer.view.report.html import box, document, paragraph, picture, section, table


def exhibits(engine: Worker, out: Path) -> Iterator[Exhibit]:
    """Writes each page into `out` when it is asked for."""
    for lesson in lessons():
        say(f"lesson {lesson.name}")
        file = f"lesson-{lesson.name}.html"
        run_file.write_file(out / file, lesson_text(lesson, ask(engine, RunLab(name=lesson.name))).encode())
        yield Exhibit(file=file, title=lesson.title, line=lesson.question, shelf=lesson.theme)


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
