"""`python -m explorer report [RUN]`: a stored run as one HTML file; without RUN a list of the stored runs.

A memory snapshot or a profiler trace of torch is opened too. The name of OUT says which program a JSON file is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from explorer.cli.command import Output, answer_console, print_json, say, table_of, verb
from explorer.cli.report import history_document, print_history, with_plans
from explorer.cli.worker import check_writable, print_or_write
from explorer.errors import BadInput
from explorer.jobs import run_file
from explorer.jobs.run_file import files_of_ranks, open_files
from explorer.jobs.store import Store
from explorer.plan.card.opened import is_history, read_history
from explorer.plan.export.traces import RUN_EXPORTS, runs_in
from explorer.record.base import from_msgpack
from explorer.view.report.report import Reported, ReportOf, report_text

Which = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run file, the id of a stored run, a memory snapshot or profiler trace; without it: a list.",
    ),
]
ReportPath = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Where the HTML file goes, or x.perfetto.json, x.speedscope.json."),
]


@verb
def report(output: Output, run: Which = None, out: ReportPath = None) -> None:
    """A run as one HTML file that answers a reader: blocks, presets and a budget to choose; no server, no network.

    A memory snapshot of torch is written as tables.
    A file name that ends in .perfetto.json or .speedscope.json writes the run's memory for these programs.
    """
    if run is None:
        _list(output)
        return
    if out is None and _is_history(Path(run)):
        history = read_history(Path(run))
        if output.json:
            print_json(history_document(history))
        else:
            print_history(history)
        return
    if out is None:
        load_run(run)
        raise BadInput(f"No file is named for the report of {run}.", hint="Give --out report.html.")
    check_writable(out)
    reported = load_run(run)
    suffix = next((suffix for suffix in RUN_EXPORTS if out.name.endswith(suffix)), None)
    print_or_write(RUN_EXPORTS[suffix](runs_in(reported.run)) if suffix else report_text(with_plans(reported)), out)


def load_run(which: str) -> ReportOf:
    """The run in a file, in the files that ranks wrote under this name, or the stored one of that id.

    Raises BadInput, UnreadableFile.
    """
    path = Path(which)
    if _is_history(path):
        return ReportOf(run=read_history(path), name=path.name)
    files = [path] if path.is_file() else files_of_ranks(path)
    if len(files) > 1:
        say(f"{escape(which)}: {len(files)} ranks side by side.")
    stored = open_files([file.read_bytes() for file in files] or [Store().export_file(which)])
    record = from_msgpack(stored.record, run_file.KINDS[stored.kind])
    assert isinstance(record, Reported), "every kind of run has a report"
    return ReportOf(run=record, name=stored.name, created=stored.created)


def _is_history(path: Path) -> bool:
    """Whether the path is a file of another program."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return is_history(file.read(64))


def _list(output: Output) -> None:
    runs = Store().list()
    if output.json:
        print_json(runs)
        return
    rows = [{"run": run.run_id, "kind": run.kind, "name": run.name} for run in runs]
    answer_console().print(table_of(rows) if runs else "No run is stored yet: measure or compare a model first.")
