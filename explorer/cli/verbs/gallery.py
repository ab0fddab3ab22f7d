"""`python -m explorer gallery --out FOLDER`: sample models and lessons as pages that a browser opens from disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from explorer.cli.command import say, verb
from explorer.cli.options import describe
from explorer.cli.worker import ask, make_folder, worker, write_file
from explorer.jobs.client import Worker
from explorer.jobs.protocol import Compare, RunLab
from explorer.jobs.store import Store
from explorer.plan.catalogue import Sample, catalogue
from explorer.plan.lessons import lessons
from explorer.plan.policy.presets import preset
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.lab import Lesson
from explorer.record.run import RunSpec
from explorer.view.compare.gradients import verdict_sentence
from explorer.view.report.gallery import Exhibit, index_text, lesson_text
from explorer.view.report.html import PLOTLY_FILE, plotly_js
from explorer.view.report.report import ReportOf, report_text

POLICY = "every-2"
"""Policy for sample models without a stored comparison."""


@verb
def gallery(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the pages go.")],
    traceback: Annotated[bool, typer.Option("--traceback", help="After an error, show where it was raised.")] = False,
) -> None:
    """The sample models and the lessons as a folder of pages: stored runs where there are any, else new ones."""
    make_folder(out)
    with worker() as engine:
        exhibits = [*_samples(engine, out), *_lessons(engine, out)]
    write_file(out / PLOTLY_FILE, plotly_js().encode())
    write_file(out / "index.html", index_text(exhibits).encode())
    say(f"Wrote {len(exhibits)} pages; open {escape(str(out / 'index.html'))}.")


def _samples(engine: Worker, out: Path) -> Iterator[Exhibit]:
    for sample in catalogue():
        graph = describe(engine, ModelRef(target=sample.target), seed=0)
        of = _stored(sample, graph) or _compared(engine, sample, graph)
        title, _, rest = sample.title.partition(". ")
        file = f"{sample.name}.html"
        write_file(out / file, report_text(replace(of, share_plotly=True)).encode())
        assert isinstance(of.run, Comparison)
        line = f"{rest}. {verdict_sentence(of.run)}." if rest else f"{verdict_sentence(of.run)}."
        yield Exhibit(file=file, title=title, line=line, shelf="Sample models")


def _stored(sample: Sample, graph: ModelGraph) -> ReportOf | None:
    """The newest comparison of a sample model that went to its end."""
    store = Store()
    runs = [run for run in store.list() if run.kind == "comparison" and run.model == sample.target]
    for run in sorted(runs, key=lambda run: -run.created):
        if run.headlines.get("comparable"):
            record = store.load(run.run_id)
            assert isinstance(record, Comparison)
            return ReportOf(run=record, name=run.name, graph=graph, created=run.created)
    return None


def _compared(engine: Worker, sample: Sample, graph: ModelGraph) -> ReportOf:
    say(f"{sample.name}: comparing {POLICY} with everything kept")
    spec = RunSpec(model=ModelRef(target=sample.target))
    candidate = RunSpec(model=spec.model, policy=preset(POLICY, graph))
    comparison: Comparison = ask(engine, Compare(baseline=spec, candidate=candidate), keep=True)
    return ReportOf(run=comparison, name=f"{sample.name}, {POLICY}", graph=graph)


def _lessons(engine: Worker, out: Path) -> Iterator[Exhibit]:
    for lesson in lessons():
        say(f"lesson {lesson.name}")
        file = f"lesson-{lesson.name}.html"
        write_file(out / file, lesson_text(lesson, ask(engine, RunLab(name=lesson.name))).encode())
        yield _exhibit(lesson, file)


def _exhibit(lesson: Lesson, file: str) -> Exhibit:
    return Exhibit(file=file, title=lesson.title, line=lesson.question, shelf=lesson.theme)
