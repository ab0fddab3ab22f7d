"""`python -m explorer export POLICY --to TARGET`: a policy file in the form of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.markup import escape

from explorer.cli.command import DIFFERENT, FIT_COLOURS, Output, print_json, say, verb
from explorer.cli.options import Out, PolicyPath
from explorer.cli.worker import print_or_write
from explorer.plan.export.formats import FORMATS, exported
from explorer.plan.policy import file as policy_file
from explorer.view.text.plan import CHECKED, export_sentences


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
    elif form.text:
        print_or_write(form.text, out)
    say(f"[{FIT_COLOURS[form.fit]}]{form.fit}[/] in {escape(form.written_for)} ({CHECKED[form.checked]})")
    for sentence in export_sentences(form):
        say(escape(sentence))
    if as_run is not None and form.as_run is not None:
        print_or_write(policy_file.dumps(replace(file, policy=form.as_run, evidence=None)), as_run)
    if form.fit == "not expressible":
        raise typer.Exit(DIFFERENT)
