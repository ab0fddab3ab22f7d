"""The same verbs without a browser: `python -m explorer VERB`. Progress goes to stderr, the answer to stdout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from explorer import __version__
from explorer.cli.command import DIFFERENT, Output, print_json, say, verb
from explorer.cli.options import ConditionOptions, Model, ModelOptions, describe, refuse_strangers
from explorer.cli.show import print_graph, print_hazards, print_models
from explorer.cli.verbs.lab import lab
from explorer.cli.verbs.pipeline import pipeline
from explorer.cli.verbs.runs import compare, matrix, measure
from explorer.cli.worker import worker, write_file
from explorer.errors import InvalidPolicy
from explorer.plan.catalogue import catalogue
from explorer.plan.export.formats import EXPORTERS, exported
from explorer.plan.export.torchrun import NEEDS
from explorer.plan.hazards.known import hazards
from explorer.plan.policy import file as policy_file
from explorer.record.base import to_plain
from explorer.view.graph.dot import graph_dot, graph_svg

app = typer.Typer(
    name="explorer",
    help="What activation checkpointing buys, what it costs, and whether the gradient is still the same.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
PolicyPath = Annotated[str, typer.Argument(metavar="policy.yaml", help="A policy file.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write to a file instead of stdout.")]


@app.callback(invoke_without_command=True)
def about(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    """What activation checkpointing buys, what it costs, and whether the gradient is still the same."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
@verb
def models(output: Output) -> None:
    """What can be loaded: the sample models, and how to load your own."""
    found = catalogue()
    if output.json:
        print_json(found)
    else:
        print_models(found)


@app.command()
@verb
def graph(
    model: Model,
    options: ModelOptions,
    output: Output,
    format: Annotated[Literal["tree", "json", "dot", "svg"], typer.Option("--format")] = "tree",
    out: Out = None,
) -> None:
    """The block graph of one observed run."""
    with worker() as engine:
        found = describe(engine, options.ref(model), options.seed)
    if output.json or format == "json":
        text = msgspec.json.encode({**to_plain(found), "fingerprint": found.fingerprint}).decode() + "\n"
    elif format == "tree":
        print_graph(found)
        return
    else:
        text = graph_dot(found) if format == "dot" else graph_svg(found)
    _answer(text, out)


@app.command()
@verb
def check(
    policy: PolicyPath, model: Model, options: ModelOptions, conditions: ConditionOptions, output: Output
) -> None:
    """Hazards and staleness of a policy file on a model, before any run. Exit 1: stale, or an error-level hazard."""
    file = policy_file.load(policy)
    with worker() as engine:
        found = describe(engine, options.ref(model), options.seed)
    stale = ""
    try:
        policy_file.check_fresh(file, found)
    except InvalidPolicy as error:
        stale = str(error)
    fits = set(file.policy.blocks) <= set(found.by_fqn)
    spec = conditions.under(options.ref(model), file.policy)
    refuse_strangers(conditions.frozen or (), found)
    fired = hazards(found, file.policy, file.pipeline, spec) if fits else ()
    if output.json:
        print_json({"fresh": not stale, "stale_because": stale, "fingerprint": found.fingerprint, "hazards": fired})
    else:
        print_hazards(policy, found, stale, fired)
    if stale or any(hazard.severity == "error" for hazard in fired):
        raise typer.Exit(DIFFERENT)


@app.command()
@verb
def export(
    policy: PolicyPath,
    to: Annotated[str, typer.Option("--to", metavar="TARGET", help=f"One of {', '.join(EXPORTERS)}.")],
    out: Out = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="After an error, show where it was raised.")] = False,
) -> None:
    """A policy file in another form; torch: a Python file that applies it with torch alone."""
    _answer(exported(policy_file.load(policy), to), out)
    if to in ("stages", "schedule"):
        say(f"[dim]{NEEDS}[/]")


for _verb in (measure, compare, matrix, pipeline, lab):
    app.command()(_verb)


def _answer(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_file(out, text.encode())
        say(f"Wrote {out}.")


def main() -> None:
    """The entry point."""
    app()
