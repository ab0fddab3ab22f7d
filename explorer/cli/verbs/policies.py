"""`python -m explorer check POLICY MODEL` names faults; `export POLICY --to TARGET` writes another form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.markup import escape

from explorer.cli.command import DIFFERENT, FIT_COLOURS, Output, answer_console, print_json, say, verb
from explorer.cli.options import ConditionOptions, Out, PolicyPath, check_frozen, describe, say_messages
from explorer.cli.report import print_model
from explorer.cli.worker import check_writable, print_or_write, worker
from explorer.errors import InvalidPolicy
from explorer.plan.export.formats import FORMATS, exported
from explorer.plan.hazards.hazards import hazards
from explorer.plan.names import listed
from explorer.plan.policy import file as policy_file
from explorer.plan.policy import read_policy
from explorer.plan.why.caveats import why_not_predicted
from explorer.record.graph import Hazard
from explorer.record.plan import Forecast
from explorer.record.run import RunSpec
from explorer.view.text.plan import export_sentences

MOST_NAMED = 4
_SEVERITIES = {"error": "bold red", "warning": "yellow", "note": "dim"}


@verb
def check(
    policy: PolicyPath,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for `measure`.")],
    conditions: ConditionOptions,
    output: Output,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the policy with this model's own names.")
    ] = None,
) -> None:
    """Hazards and staleness of a policy file on a model, before any run. Exit 1: stale, or an error-level hazard."""
    check_writable(out)
    spec = conditions.spec(model)
    with worker() as engine:
        graph = describe(engine, RunSpec(model=spec.model, seed=spec.seed))
    read, stale, because = None, "", ""
    fired: tuple[Hazard, ...] = ()
    try:
        read = read_policy.named(policy, graph)
        stale = read.changed
    except InvalidPolicy as error:
        if not Path(policy).is_file():  # a name that is neither a preset nor a block
            raise
        stale = str(error)
    check_frozen(conditions.frozen or (), graph)
    if read is not None:
        fired = hazards(graph, read.policy, read.file.pipeline, replace(spec, policy=read.policy))
        because = why_not_predicted(read.policy, graph, Forecast())
    if output.json:
        verdict = {"fresh": not stale, "stale_because": stale, "fingerprint": graph.fingerprint}
        print_json({**verdict, "hazards": fired, "not_foretold_because": because, "read": read})
    else:
        print_model(spec.model.target, graph.batch)
        print_hazards(stale, fired)
        if read is not None:
            say_messages(replace(read, changed=""))
        if because:
            say(escape(because))
    if out is not None and read is not None:
        written = policy_file.file_of(read.policy, graph, plan=read.file.pipeline, ranks=read.file.ranks)
        print_or_write(policy_file.dumps(written), out)
    if stale or any(hazard.severity == "error" for hazard in fired):
        raise typer.Exit(DIFFERENT)


def print_hazards(stale: str, hazards: tuple[Hazard, ...]) -> None:
    """Every rule that fired, or that none did."""
    console = answer_console()
    if stale:
        console.print(f"[bold red]stale[/] {escape(stale)}\n")
    for hazard in hazards:
        title = f"[{_SEVERITIES[hazard.severity]}]{hazard.severity}[/] [bold]{escape(hazard.rule)}[/]"
        console.print(f"{title} [dim]{escape(listed(hazard.blocks, MOST_NAMED))}[/]")
        console.print(f"{escape(hazard.sentence)} {escape(hazard.remedy)}\n", soft_wrap=False)
    if not hazards and not stale:
        console.print("[green]Nothing known goes wrong: the policy fits the model and no hazard was found.[/]")


@verb
def export(
    policy: PolicyPath,
    output: Output,
    to: Annotated[str, typer.Option("--to", metavar="TARGET", help=f"One of {', '.join(FORMATS)}.")],
    out: Out = None,
    as_run: Annotated[
        Path | None,
        typer.Option("--as-run", metavar="FILE", help="Write what the target will do as a policy, to measure it."),
    ] = None,
) -> None:
    """A policy file in the form of another program, and which blocks that will really recompute."""
    file = policy_file.load(policy)
    form = exported(file, to)
    if output.json:
        print_json(form)
    else:
        print_or_write(form.text, out)
    say(f"[{FIT_COLOURS[form.fit]}]{form.fit}[/] in {escape(form.written_for)}")
    for sentence in export_sentences(form):
        say(escape(sentence))
    if as_run is not None and form.as_run is not None:
        print_or_write(policy_file.dumps(replace(file, policy=form.as_run, evidence=None)), as_run)
