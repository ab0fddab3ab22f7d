"""`checkpoint-explorer report [RUN]`: a run in the terminal, or as one HTML file; `gallery`: samples and lessons.

Without RUN `report` lists the stored runs. It opens a memory snapshot or a profiler trace of torch too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.markup import escape

from explorer import slices
from explorer.cli.command import Output, answer_console, print_json, say, table_of, verb
from explorer.cli.options import describe
from explorer.cli.report import document, print_history, print_lines, print_ranks, print_record, with_plans
from explorer.cli.worker import ask, check_writable, make_folder, print_or_write, worker
from explorer.jobs import run_file
from explorer.jobs.client import Worker
from explorer.jobs.protocol import Measure
from explorer.jobs.run_file import files_of_ranks, open_files
from explorer.jobs.store import Store
from explorer.plan.card.opened import is_history, read_history
from explorer.plan.catalogue import Sample, catalogue, default_size, recorded_sample
from explorer.plan.export.traces import RUN_EXPORTS, runs_in
from explorer.plan.summary import history_document, summarize, summary_lines
from explorer.record.base import from_msgpack, to_plain
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelRef
from explorer.record.history import MemoryHistory
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.record.run import RunSpec
from explorer.view.report.explorable import Exhibit, index_text
from explorer.view.report.html import PLOTLY_FILE, plotly_js
from explorer.view.report.report import Reported, ReportOf, report_text

Which = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="A run file, an id, a memory snapshot or a profiler trace.")
]
ReportPath = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="x.html, x.perfetto.json or x.speedscope.json.")
]


@verb
def report(output: Output, run: Which = None, out: ReportPath = None) -> None:
    """A run in the terminal, or with --out as one HTML file that answers a reader: blocks, presets and a budget.

    A memory snapshot of torch is written as tables.
    A file name that ends in .perfetto.json or .speedscope.json writes the run's memory for these programs.
    """
    if run is None:
        _list(output)
        return
    check_writable(out)
    reported = load_run(run)
    if out is None:
        answer_run(reported.run, run, output)
        return
    suffix = next((suffix for suffix in RUN_EXPORTS if out.name.endswith(suffix)), None)
    print_or_write(RUN_EXPORTS[suffix](runs_in(reported.run)) if suffix else report_text(with_plans(reported)), out)


def answer_run(run: Reported, name: str, output: Output) -> None:
    """To stdout: the run, as text or as JSON."""
    if output.json:
        print_json(document_of(run))
    else:
        print_run(run, name)


def print_run(run: Reported, name: str) -> None:
    """To stdout: the lines of a step, the tables of other runs."""
    if isinstance(run, Measurement):
        is_stored_model = not Path(name).exists() and not run.spec.model.is_recorded
        print_lines(summary_lines(summarize(run, name=run.spec.model.target if is_stored_model else name)))
    elif isinstance(run, Comparison):
        print_record(run)
    elif isinstance(run, RecordedRanks):
        print_ranks(run)
    elif isinstance(run, MemoryHistory):
        print_history(run)
    for part in slices.parts("cli.report").values():
        if type(run) in part.PRINTERS:
            part.PRINTERS[type(run)](run)


def document_of(run: Reported) -> dict[str, object]:
    """The record with its headline figures."""
    if isinstance(run, MemoryHistory):
        return history_document(run)
    if isinstance(run, (Measurement, Comparison)):
        return document(run)
    return {**run.headlines(), **to_plain(run)}


def load_run(which: str) -> ReportOf:
    """The run in a file, in the files that ranks wrote under this name, or the stored one of that id.

    Raises BadInput, UnreadableFile.
    """
    path = Path(which)
    if path.is_file():
        with path.open("rb") as file:
            is_foreign = is_history(file.read(64))
        if is_foreign:
            return ReportOf(run=read_history(path), name=path.name)
    files = [path] if path.is_file() else files_of_ranks(path)
    if len(files) > 1:
        say(f"{escape(which)}: {len(files)} ranks side by side.")
    stored = open_files([run_file.read_path(file) for file in files] or [Store().export_file(which)])
    record = from_msgpack(stored.record, run_file.KINDS[stored.kind])
    assert isinstance(record, Reported), "every kind of run has a report"
    return ReportOf(run=record, name=stored.name, created=stored.created)


def _list(output: Output) -> None:
    runs = Store().list()
    if output.json:
        print_json(runs)
        return
    rows = [{"run": run.run_id, "kind": run.kind, "name": run.name} for run in runs]
    answer_console().print(table_of(rows) if runs else "No run is stored yet: measure or compare a model first.")


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
        exhibits = list(_samples(engine, out))
        for part in slices.parts("cli.gallery").values():
            exhibits += part.exhibits(engine, out)
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
    runs = [run for run in runs if not run.imported]  # a file may state any date
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
