"""`checkpoint-explorer FILE [--card NAME]`: finds out what FILE is and answers in about twelve lines.

The word `show` may be left out. The first line says what the file was taken for, and how to say otherwise.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import webbrowser
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.markup import escape

from explorer.cli.command import Output, answer_console, print_json, say, verb
from explorer.cli.options import CardStepOptions, describe
from explorer.cli.report import print_lines, with_plans
from explorer.cli.verbs.report import answer_run, load_run
from explorer.cli.worker import ask, check_writable, print_or_write, worker
from explorer.jobs.on_card import OnCardRequest
from explorer.jobs.protocol import Measure
from explorer.jobs.store import Store
from explorer.plan.guard import lock as lock_file
from explorer.plan.policy import file as policy_file
from explorer.plan.recognize import recognize
from explorer.plan.summary import Line, is_too_large, judged, summarize, summary_document, summary_lines
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.view.report.report import ReportOf, report_text
from explorer.view.text.files import lock_lines, policy_lines

File = Annotated[
    str,
    typer.Argument(metavar="FILE", help="A script, a model, a config.json, hf:NAME, a run, snapshot, policy or lock."),
]
ScriptArguments = Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own arguments.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowOptions(CardStepOptions):
    """Options of a model's step, and where the answer goes."""

    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the answer as a page, too.", rich_help_panel="Output"),
    ] = None
    open_page: Annotated[
        bool, typer.Option("--open", help="Open that page in the browser.", rich_help_panel="Output")
    ] = False


@verb
def show(file: File, options: ShowOptions, output: Output, script_arguments: ScriptArguments = None) -> None:
    """What FILE holds, in about twelve lines. `checkpoint-explorer FILE` says the same.

    A training script is run until a good step is recorded. A model takes one step. Other files are opened.
    """
    check_writable(options.html)
    options.parsed_card()
    source = recognize(file)
    if output.json:
        say(escape(source.first_line))
    else:
        answer_console().print(escape(source.first_line))
        sys.stdout.flush()
    if source.kind == "policy":
        policy = policy_file.load(source.target)
        _answer_lines(policy, policy_lines(policy, file), output)
    elif source.kind == "lock":
        lock = lock_file.load(Path(source.target))
        _answer_lines(lock, lock_lines(lock, file), output)
    elif source.kind == "script":
        _show_script(Path(file), options, output, script_arguments or [])
    elif source.kind == "model":
        run = _measured(source.target, options)
        _answer(ReportOf(run=run, name=source.target), source.target, options, output)
    else:
        _answer(load_run(source.target), source.target, options, output)


def _answer(of: ReportOf, name: str, options: ShowOptions, output: Output) -> None:
    """Prints the lines of a run, or what else its kind of record has, and writes the page."""
    run = of.run
    step = run.fullest if isinstance(run, RecordedRanks) else run
    if isinstance(step, Measurement):
        summary = summarize(step, name=name, card=options.parsed_card())
        specs = [replace(step.spec, policy=change.policy) for change in summary.changes]
        summary = judged(summary, list(map(Store().verdict_on, specs)))
        _answer_lines(summary_document(summary), summary_lines(summary), output)
    else:
        answer_run(run, name, output)
    _write_page(of, options)


def _write_page(of: ReportOf | None, options: ShowOptions) -> None:
    """Writes the page of a run if one is wanted, and opens it. `of` None: nothing was recorded."""
    if options.html is None and not options.open_page:
        return
    if of is None:
        say("No page was written: memory was refused before a step was recorded.")
        return
    page = options.html or Path(tempfile.mkdtemp(prefix="checkpoint-explorer-")) / "report.html"
    print_or_write(report_text(with_plans(of)), page)
    if options.open_page:
        webbrowser.open(page.resolve().as_uri())


def _measured(target: str, options: ShowOptions) -> Measurement:
    """One step of a model: run here, or predicted where the model is too large for this machine."""
    spec = replace(
        dataclasses.replace(options, card=None, allocator="", torch="", n_steps=None).spec(target),
        n_repeats=min(options.n_repeats, 3),
    )
    with worker() as engine:
        graph = describe(engine, spec, without_data=True)
        is_large = is_too_large(graph)
        if is_large and not options.predict:
            say("The model is too large for this machine's memory: its step is predicted.")
        request = Measure(spec=spec, until_it_fits=False, without_data=is_large or options.predict)
        measured: Measurement = ask(engine, request)
    return replace(measured, graph=measured.graph or graph)


def _show_script(script: Path, options: ShowOptions, output: Output, arguments: list[str]) -> None:
    """Runs the script until a good step is recorded, and answers from the record."""
    from explorer.cli.verbs.run import USUAL_CARD, Chosen, under_watch

    chosen = Chosen(stop=True)
    recorded: list[tuple[Measurement, Path]] = []
    request = OnCardRequest(card=options.card or USUAL_CARD, out=chosen.out, json=output.json)

    def on_card(run: Measurement | None) -> None:
        _write_page(None if run is None else ReportOf(run=run, name=run.recorded_in), options)

    under_watch(request, script, arguments, chosen, lambda run, path: recorded.append((run, path)), on_card)
    if recorded:  # else the imaginary card has answered
        run, path = recorded[-1]
        _answer(ReportOf(run=run, name=run.recorded_in), str(path), options, output)


def _answer_lines(record: object, lines: Iterable[Line], output: Output) -> None:
    if output.json:
        print_json(record)
    else:
        print_lines(lines)
