"""`python -m explorer export POLICY --to TARGET`: a policy file in the form that somebody else needs."""

from __future__ import annotations

from typing import Annotated

import typer

from explorer.cli.command import say, verb
from explorer.cli.options import Out, PolicyPath
from explorer.cli.worker import print_or_write
from explorer.plan.export.formats import FORMATS, export_format
from explorer.plan.policy import file as policy_file


@verb
def export(
    policy: PolicyPath,
    to: Annotated[str, typer.Option("--to", metavar="TARGET", help=f"One of {', '.join(FORMATS)}.")],
    out: Out = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="After an error, show where it was raised.")] = False,
) -> None:
    """A policy file in another form; torch: a Python file that applies it with torch alone."""
    file = policy_file.load(policy)
    form = export_format(to)
    print_or_write(form.write(file), out)
    if form.note:
        say(f"[dim]{form.note}[/]")
