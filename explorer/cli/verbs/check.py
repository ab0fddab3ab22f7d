"""`python -m explorer check POLICY MODEL`: faults of a policy file before any run."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.markup import escape

from explorer.cli.command import DIFFERENT, Output, answer_console, print_json, say, verb
from explorer.cli.options import ConditionOptions, PolicyPath, check_frozen, describe, say_source
from explorer.cli.worker import check_writable, print_or_write, worker
from explorer.errors import BadInput, InvalidPolicy
from explorer.plan.hazards.hazards import hazards
from explorer.plan.imports import read_policy
from explorer.plan.names import listed
from explorer.plan.policy import file as policy_file
from explorer.plan.why.caveats import why_not_predicted
from explorer.record.graph import Hazard, ModelGraph
from explorer.record.plan import Forecast
from explorer.record.run import RunSpec

MOST_NAMED = 4
_SEVERITIES = {"error": "bold red", "warning": "yellow", "note": "dim"}


@verb
def check(
    policy: PolicyPath,
    conditions: ConditionOptions,
    output: Output,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="As for `measure`.")] = None,
    flags: Annotated[
        str | None, typer.Option(metavar="LINE", help='Flags in place of a file: "--recompute-granularity full ...".')
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the policy with this model's own names.")
    ] = None,
) -> None:
    """Hazards and staleness of a policy file, or of a program's settings, on a model, before any run.
    Exit 1: stale, or an error-level hazard."""
    check_writable(out)
    if (model is None) == (flags is None):
        raise BadInput("A policy file or --flags is checked on one model.", hint=_USAGE)
    spec = conditions.spec(model or policy)  # with --flags the model is the only argument
    with worker() as engine:
        graph = describe(engine, RunSpec(model=spec.model, seed=spec.seed))
    read, stale = None, ""
    try:
        read = read_policy.load(policy, graph) if flags is None else read_policy.read(flags, graph)
        stale = read.changed
    except InvalidPolicy as error:
        stale = str(error)
    check_frozen(conditions.frozen or (), graph)
    fired: tuple[Hazard, ...] = ()
    if read is not None:
        spec = replace(spec, policy=read.policy)
        fired = hazards(graph, read.policy, read.file.pipeline, spec)
    because = why_not_predicted(read.policy, graph, Forecast()) if read else ""
    if output.json:
        verdict = {"fresh": not stale, "stale_because": stale, "fingerprint": graph.fingerprint}
        print_json({**verdict, "hazards": fired, "not_foretold_because": because, "read": read})
    else:
        print_hazards(flags or policy, graph, stale, fired)
        if read is not None:
            say_source(replace(read, changed=""))
        if because:
            say(escape(because))
    if out is not None and read is not None:
        written = policy_file.file_of(read.policy, graph, plan=read.file.pipeline, ranks=read.file.ranks)
        print_or_write(policy_file.dumps(written), out)
    if stale or any(hazard.severity == "error" for hazard in fired):
        raise typer.Exit(DIFFERENT)


_USAGE = 'Write `check policy.yaml MODEL`, or `check MODEL --flags "--recompute-granularity full ..."`.'


def print_hazards(policy_path: str, graph: ModelGraph, stale: str, hazards: tuple[Hazard, ...]) -> None:
    """Every rule that fired, or that none did."""
    console = answer_console()
    console.print(f"\n[bold]{escape(policy_path)}[/] on [bold]{escape(graph.model.target)}[/]\n")
    if stale:
        console.print(f"  [bold red]stale[/]    {escape(stale)}\n")
    for hazard in hazards:
        colour = _SEVERITIES[hazard.severity]
        console.print(
            f"  [{colour}]{hazard.severity:<8}[/] [bold]{escape(hazard.rule)}[/]  "
            f"[dim]{escape(listed(hazard.blocks, MOST_NAMED))}[/]"
        )
        for line in textwrap.wrap(hazard.sentence, 96) + textwrap.wrap(hazard.remedy, 96):
            console.print(f"           {escape(line)}")
        console.print()
    if not hazards and not stale:
        console.print("  [green]Nothing known goes wrong: the policy fits the model and no hazard was found.[/]\n")
