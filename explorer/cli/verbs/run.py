"""`python -m explorer run train.py --at 2 --on-oom oom.explorer -- --lr 1e-4`: a training script, under watch."""

from __future__ import annotations

import sys
from pathlib import Path
from traceback import print_exception
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from explorer.cli.command import DIFFERENT, say, verb
from explorer.errors import BadInput, ExplorerError
from explorer.plan.names import listed
from explorer.view.drawing.units import count

if TYPE_CHECKING:
    from explorer.own_loop.watch import Watch

Script = Annotated[Path, typer.Argument(metavar="SCRIPT", help="A training script: what `python` would be given.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own arguments.")]
At = Annotated[list[int] | None, typer.Option("--at", metavar="STEP", help="Record this step; may be repeated.")]
OnOom = Annotated[
    Path | None,
    typer.Option("--on-oom", metavar="FILE", help="Write what is held when memory is refused; `heal`: go on."),
]
Files = Annotated[str, typer.Option("--out", metavar="PATTERN", help="Where a step is written; {step} is its number.")]


@verb
def run(
    script: Script, arguments: Arguments = None, at: At = None, on_oom: OnOom = None, out: Files = "step{step}.explorer"
) -> None:
    """A training script, unmodified, with chosen steps recorded. Under torchrun each rank writes its own files."""
    from explorer.own_loop.script import ScriptUnderWatch  # torch: no other verb needs it in this process

    if not at and on_oom is None:
        raise BadInput("Nothing to watch for.", hint="Give --at 2 for the second step, or --on-oom oom.explorer.")
    watched = ScriptUnderWatch(script, at=tuple(at or ()), on_oom=on_oom, files=out)
    try:
        watched.run(arguments or ())
    except SystemExit as ended:  # `sys.exit(main())` ends most scripts that are well
        if ended.code:
            _say_written(watched.watch)
            raise
    except ExplorerError:
        raise
    except Exception as error:  # the script's own, shown as Python shows it
        _say_written(watched.watch)
        print_exception(error)
        sys.stdout.flush()
        raise typer.Exit(DIFFERENT) from None
    if watched.watch is None:
        raise BadInput(
            f"{script} made no optimizer of a model's parameters, so no step could be found.",
            hint="Put explorer.watch(model) or explorer.record_step(model) into it.",
        )
    _say_written(watched.watch)
    missed = [step for step in at or () if step not in watched.watch.written]
    if missed:
        steps, which = count(watched.watch.n_steps, "step"), listed([f"step {step}" for step in missed])
        raise BadInput(
            f"{script} took {steps}; no file was written of {which}.",
            hint="Steps are counted from 1, by the optimizer; a warning says why one that was taken is missing.",
        )


def _say_written(watch: Watch | None) -> None:
    for step, path in watch.written.items() if watch is not None else ():
        say(escape(f"Wrote step {step} to {path}."))
