"""`python -m explorer run train.py --at 2 --on-oom oom.explorer -- --lr 1e-4`: a training script, under watch.

With `--card h100` it runs on a card that is not there, see explorer/own_loop/on_card.py.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from traceback import print_exception
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from explorer.cli.command import DIFFERENT, Output, answer_console, print_json, say, verb
from explorer.cli.report import print_record
from explorer.errors import BadInput, ExplorerError
from explorer.jobs.run_file import stored_record, write, write_file
from explorer.plan.names import listed
from explorer.plan.why.checkpointing import checkpointing_lines
from explorer.record.measurement import Measurement
from explorer.view.drawing.units import count, mib

if TYPE_CHECKING:
    from explorer.own_loop.on_card import StepsOnCard
    from explorer.own_loop.watch import Watch

Script = Annotated[Path, typer.Argument(metavar="SCRIPT", help="A training script: what `python` would be given.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own arguments.")]
At = Annotated[list[int] | None, typer.Option("--at", metavar="STEP", help="Record this step; may be repeated.")]
OnOom = Annotated[
    Path | None,
    typer.Option("--on-oom", metavar="FILE", help="Write what is held when memory is refused; `heal`: go on."),
]
Files = Annotated[str, typer.Option("--out", metavar="PATTERN", help="Where a step is written; {step} is its number.")]
OnCard = Annotated[
    str | None,
    typer.Option("--card", metavar="CARD", help="Run on a card that is not there: `h100` or `24GiB`. No GPU needed."),
]
Steps = Annotated[
    int | None, typer.Option("--steps", min=1, help="With --card: end after so many steps, not when the peak repeats.")
]


@dataclass(frozen=True, kw_only=True)
class OnCardRequest:
    """Options of `run --card`."""

    card: str
    steps: int | None
    out: str
    json: bool

    def options(self) -> list[str]:
        """As the command line has them."""
        options = ["--card", self.card, "--out", self.out]
        if self.steps is not None:
            options += ["--steps", str(self.steps)]
        if self.json:
            options.append("--json")
        return options


@verb
def run(
    script: Script,
    output: Output,
    arguments: Arguments = None,
    at: At = None,
    on_oom: OnOom = None,
    out: Files = "step{step}.explorer",
    card: OnCard = None,
    steps: Steps = None,
) -> None:
    """A training script, unmodified, with chosen steps recorded. Under torchrun each rank writes its own files."""
    if card is not None:
        _on_card(OnCardRequest(card=card, steps=steps, out=out, json=output.json), script, arguments or [])
        return
    if steps is not None or output.json:
        raise BadInput("--steps and --json belong to --card.", hint="Add --card h100, or leave them out.")
    _under_watch(script, arguments or [], at or [], on_oom, out)


def _under_watch(script: Path, arguments: list[str], at: list[int], on_oom: Path | None, out: str) -> None:
    """Runs the script in this process, with the chosen steps recorded."""
    from explorer.own_loop.on_card import needs_cuda
    from explorer.own_loop.script import ScriptUnderWatch  # torch: no other verb needs it in this process

    if not at and on_oom is None:
        raise BadInput("Nothing to watch for.", hint="Give --at 2 for the second step, or --on-oom oom.explorer.")
    watched = ScriptUnderWatch(script, at=tuple(at), on_oom=on_oom, files=out)
    try:
        watched.run(arguments)
    except SystemExit as ended:  # `sys.exit(main())` ends most scripts that are well
        if ended.code:
            _say_written(watched.watch)
            raise
    except ExplorerError:
        raise
    except Exception as error:  # the script's own, shown as Python shows it
        if (without_gpu := needs_cuda(script, error)) is not None:
            raise without_gpu from error
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
    missed = [step for step in at if step not in watched.watch.written]
    if missed:
        taken_steps, which = count(watched.watch.n_steps, "step"), listed([f"step {step}" for step in missed])
        raise BadInput(
            f"{script} took {taken_steps}; no file was written of {which}.",
            hint="Steps are counted from 1, by the optimizer; a warning says why one that was taken is missing.",
        )


def _say_written(watch: Watch | None) -> None:
    for step, path in watch.written.items() if watch is not None else ():
        say(escape(f"Wrote step {step} to {path}."))
    last = list(watch.runs.values())[-1:] if watch is not None else []
    for line in (line for run in last for line in checkpointing_lines(run.measurement)):
        say(escape(line))


def _on_card(request: OnCardRequest, script: Path, arguments: list[str]) -> None:
    """Runs the script on an imaginary card, in a process of its own, and prints what it held there."""
    from explorer.own_loop.on_card import is_on_card, run_again_on, run_on_card

    if not is_on_card():
        raise typer.Exit(run_again_on(request.card, ["run", *request.options(), str(script), "--", *arguments]))
    try:
        with redirect_stdout(sys.stderr if request.json else sys.stdout):
            result = run_on_card(script, arguments, request.steps)
    except ExplorerError:
        raise
    except Exception as error:
        print_exception(error)
        sys.stdout.flush()
        raise typer.Exit(DIFFERENT) from None
    step = result.refused or (None if result.last is None else result.last.measurement)
    if step is not None:
        number = len(result.peaks) + (result.refused is not None)
        path = write_file(Path(request.out.replace("{step}", str(number))), write(stored_record(step)))
        say(escape(f"Wrote the last step to {path}."))
    if request.json:
        print_json({"card": result.card, "peaks": result.peaks, "refused": result.refusal or None})
    else:
        _print_steps(result, step, script.name)
    if result.refusal:
        raise typer.Exit(DIFFERENT)


def _print_steps(result: StepsOnCard, step: Measurement | None, script: str) -> None:
    console = answer_console()
    console.print(f"\n  [bold]{escape(script)} on {escape(result.card)}[/]")
    console.print("  [dim]torch's own CUDA code. No kernel ran: values are zeros, and times say nothing.[/]\n")
    for number, (allocated, reserved) in enumerate(result.peaks, 1):
        console.print(f"  Step {number}: {mib(allocated)} allocated, {mib(reserved)} reserved")
    if step is not None:
        print_record(step)
    if result.refusal:
        console.print(f"  [bold red]Refused[/]  {escape(result.refusal)}")
    else:
        console.print("  [bold green]Fits[/]  every request was granted.")
