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
from explorer.cli.report import with_plans
from explorer.cli.worker import ask, make_folder, worker
from explorer.jobs import run_file
from explorer.jobs.client import Worker
from explorer.jobs.protocol import Measure, RunLab
from explorer.jobs.store import Store
from explorer.plan.catalogue import Sample, catalogue, default_size, recorded_sample
from explorer.plan.lessons import lessons
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec
from explorer.view.report.gallery import Exhibit, index_text, lesson_text
from explorer.view.report.html import PLOTLY_FILE, plotly_js
from explorer.view.report.report import ReportOf, report_text


@verb
def gallery(
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the pages go.")],
    traceback: Annotated[bool, typer.Option("--traceback", help="After an error, show where it was raised.")] = False,
) -> None:
    """The sample models and the lessons as a folder of pages that any static host serves, or a browser opens from disk.

    A model has the newest stored comparison, else the step bundled with it; every lesson is run.
    """
    make_folder(out)
    with worker() as engine:
        exhibits = [*_samples(engine, out), *_lessons(engine, out)]
    run_file.write_file(out / PLOTLY_FILE, plotly_js().encode())
    run_file.write_file(out / "index.html", index_text(exhibits).encode())
    say(f"Wrote {len(exhibits)} pages; open {escape(str(out / 'index.html'))}.")


def _samples(engine: Worker, out: Path) -> Iterator[Exhibit]:
    for sample in catalogue():
        say(f"model {sample.name}")
        of = with_plans(_stored(sample) or _bundled(sample) or _measured(engine, sample))
        title, _, rest = sample.title.partition(". ")
        file = f"{sample.name}.html"
        run_file.write_file(out / file, report_text(replace(of, share_plotly=True, lesson=sample.lesson)).encode())
        yield Exhibit(file=file, title=title, line=f"{rest}." if rest else "", shelf="Sample models")


def _stored(sample: Sample) -> ReportOf | None:
    """The newest comparison of a sample model that went to its end and has the model's graph."""
    store = Store()
    runs = [run for run in store.list() if run.kind == "comparison" and run.model == sample.target]
    for run in sorted(runs, key=lambda run: -run.created):
        if run.headlines.get("comparable"):
            record = store.load(run.run_id)
            assert isinstance(record, Comparison)
            if run_file.graph_of(record) is not None:
                return ReportOf(run=record, name=run.name, created=run.created)
    return None


def _bundled(sample: Sample) -> ReportOf | None:
    """The step that is bundled with the sample models, recorded on another machine."""
    recorded = recorded_sample(ModelRef(target=sample.target, size=default_size(sample.sizes)))
    return None if recorded is None else ReportOf(run=recorded.run, name=sample.title, plans=recorded.front.plans)


def _measured(engine: Worker, sample: Sample) -> ReportOf:
    spec = RunSpec(model=ModelRef(target=sample.target))
    graph = describe(engine, spec)
    return ReportOf(run=ask(engine, Measure(spec=spec), keep=True), name=sample.title, graph=graph)


def _lessons(engine: Worker, out: Path) -> Iterator[Exhibit]:
    for lesson in lessons():
        say(f"lesson {lesson.name}")
        file = f"lesson-{lesson.name}.html"
        run_file.write_file(out / file, lesson_text(lesson, ask(engine, RunLab(name=lesson.name))).encode())
        yield Exhibit(file=file, title=lesson.title, line=lesson.question, shelf=lesson.theme)
