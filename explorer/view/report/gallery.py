"""Gallery of the sample models and lessons, as a folder of pages that a browser opens from disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from explorer.record.lab import LabOutcome, Lesson
from explorer.view.lab import lab_chart, lab_table
from explorer.view.report.html import box, document, paragraph, picture, section, table


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """A page of the gallery."""

    file: str
    title: str
    line: str
    """Content of the page in a sentence."""
    shelf: str
    """`Sample models`, or the theme of a lesson."""


def index_text(exhibits: Sequence[Exhibit]) -> str:
    """The first page: every other one by shelf."""
    shelves = dict.fromkeys(exhibit.shelf for exhibit in exhibits)
    origin = (
        "Choose blocks of a model, and see what a training step saves and costs. The pages need no server and no "
        "network. Lessons ran on the machine that made this gallery; the page of a model names its machine."
    )
    parts = [section(shelf, [_shelf([one for one in exhibits if one.shelf == shelf])]) for shelf in shelves]
    return document(
        "Checkpoint Explorer: gallery", ["<h1>Checkpoint Explorer</h1>", paragraph(origin, "quiet"), *parts]
    )


def _shelf(exhibits: Sequence[Exhibit]) -> str:
    return f'<div class="gallery">{"".join(map(_card, exhibits))}</div>'


def _card(exhibit: Exhibit) -> str:
    inside = f"<b>{escape(exhibit.title)}</b>{paragraph(exhibit.line, 'quiet')}"
    return f'<a href="{escape(exhibit.file)}"><div class="card">{inside}</div></a>'


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
