"""The lessons as pages of `checkpoint-explorer gallery`; every lesson is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from explorer.cli.command import say
from explorer.cli.worker import ask
from explorer.jobs import run_file
from explorer.jobs.client import Worker
from explorer.lab.jobs import RunLab
from explorer.lab.plan import lessons
from explorer.lab.view.gallery import lesson_text
from explorer.view.report.explorable import Exhibit


def exhibits(engine: Worker, out: Path) -> Iterator[Exhibit]:
    """Writes each page into `out` when it is asked for."""
    for lesson in lessons():
        say(f"lesson {lesson.name}")
        file = f"lesson-{lesson.name}.html"
        run_file.write_file(out / file, lesson_text(lesson, ask(engine, RunLab(name=lesson.name))).encode())
        yield Exhibit(file=file, title=lesson.title, line=lesson.question, shelf=lesson.theme)
