"""`python -m explorer export POLICY --to TARGET`: a policy file in the form of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape

from explorer.cli.command import DIFFERENT, FIT_COLOURS, Output, print_json, say, verb
from explorer.cli.options import Out, PolicyPath
from explorer.cli.worker import print_or_write
from explorer.plan.export.formats import FORMATS, exported
from explorer.plan.names import listed
from explorer.plan.policy import file as policy_file
from explorer.record.policy_file import Export

MOST_NAMED = 40
_CHECKED = {"executed": "such exports are run in the tests", "grammar": "held against its documents, not run"}


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
    _tell(form)
    if as_run is not None and form.as_run is not None:
        print_or_write(policy_file.dumps(msgspec.structs.replace(file, policy=form.as_run, evidence=None)), as_run)
    if form.fit == "not expressible":
        raise typer.Exit(DIFFERENT)


def _tell(form: Export) -> None:
    """Writes to stderr the fit of the policy, the recomputed blocks and the reasons."""
    say(f"[{FIT_COLOURS[form.fit]}]{form.fit}[/] in {escape(form.written_for)} ({_CHECKED[form.checked]})")
    if form.recomputed is not None and form.fit != "not expressible":
        names = listed([fqn or "the model" for fqn in form.recomputed], MOST_NAMED)
        say(f"It recomputes {escape(names) or 'nothing'}.")
    for sentence in form.reasons:
        say(escape(sentence))
    for sentence in form.notes:
        say(f"[dim]{escape(sentence)}[/]")
