"""`checkpoint-explorer run train.py --at 2 --on-oom oom.explorer -- --lr 1e-4`: a training script, under watch.

Without options a good step is recorded and printed. With `--card h100` the script runs on a card that is not there, see
explorer/own_loop/on_card.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from traceback import print_exception
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from explorer.cli.command import COULD_NOT_RUN, DIFFERENT, CleanConsole, Output, answer_console, print_json, say, verb
from explorer.cli.report import print_lines
from explorer.errors import BadInput, ExplorerError, asks_for_cuda
from explorer.jobs.on_card import OnCardRequest, file_of_module
from explorer.plan.names import listed
from explorer.plan.summary import Summary, summarize, summary_document, summary_lines
from explorer.plan.why.checkpointing import checkpointing_lines
from explorer.record.measurement import Measurement
from explorer.view.drawing.units import count, mib

if TYPE_CHECKING:
    from explorer.own_loop.on_card import StepsOnCard
    from explorer.own_loop.script import ScriptUnderWatch

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="A training script: what `python` would be given.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="The script's own arguments.")]
At = Annotated[
    list[str] | None,
    typer.Option("--at", metavar="STEP", help="Record this step; may be repeated. `last` records all and keeps one."),
]
WorstOf = Annotated[
    int, typer.Option("--worst-of", metavar="N", min=0, help="Record the first N steps and keep the highest peak.")
]
Stop = Annotated[bool, typer.Option("--stop", help="End the training when the steps are recorded.")]
OnOom = Annotated[
    Path | None,
    typer.Option("--on-oom", metavar="FILE", help="Write what is held when memory is refused; `heal`: go on."),
]
Files = Annotated[str, typer.Option("--out", metavar="PATTERN", help="Where a step is written; {step} is its number.")]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for `python -m package.train`.")]
OnCard = Annotated[
    str | None,
    typer.Option("--card", metavar="CARD", help="Run on a card that is not there: `h100` or `24GiB`. No GPU needed."),
]
Steps = Annotated[
    int | None, typer.Option("--steps", min=1, help="With --card: end after so many steps, not when the peak repeats.")
]
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", min=1, max=16, help="With --card: so many ranks as by torchrun, a card each."),
]


OnCardAnswer = Callable[[Measurement | None], None] | None
"""Called with the step of the fullest card after it was printed."""
USUAL_CARD = "h100"
"""For a script that asks for a GPU on a machine without one."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The steps that are recorded, and what is done with them."""

    at: At = None
    worst_of: WorstOf = 0
    on_oom: OnOom = None
    out: Files = "step{step}.explorer"
    stop: Stop = False
    module: Module = False

    @property
    def is_plain(self) -> bool:
        """True if no step is named: a good step is then recorded."""
        return not self.at and self.on_oom is None and not self.worst_of

    def steps(self) -> tuple[int, ...]:
        """The numbers in `--at`. Raises BadInput for what is neither a number nor `last`."""
        numbers = [step for step in self.at or () if step != "last"]
        if wrong := [step for step in numbers if not step.isdecimal()]:
            raise BadInput(f"--at {wrong[0]} is no step.", hint="Give a number from 1 on, or `last`.")
        if self.stop and not self.is_plain and ("last" in (self.at or ()) or not (numbers or self.worst_of)):
            raise BadInput("--stop has no step to stop after.", hint="Give --at 2 or --worst-of 10 with it.")
        return tuple(map(int, numbers))


@verb
def run(
    script: Script,
    output: Output,
    chosen: Chosen,
    arguments: Arguments = None,
    card: OnCard = None,
    steps: Steps = None,
    ranks: Ranks = None,
) -> None:
    """A training script, unmodified, with chosen steps recorded. Under torchrun each rank writes its own files.

    Without --at, --worst-of and --on-oom a good step is recorded and printed: the second, if the training takes two.
    """
    if chosen.module:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    path = file_of_module(script) if chosen.module else Path(script)
    request = OnCardRequest(card=card or USUAL_CARD, steps=steps, ranks=ranks, out=chosen.out, json=output.json)
    if card is not None:
        if chosen.stop or not chosen.is_plain:
            raise BadInput(
                "--at, --worst-of, --on-oom and --stop are about a run without --card, which ends by itself.",
                hint="Leave them out; --steps 4 says how many steps it takes.",
            )
        _on_card(request, path, arguments or [])
        return
    if steps is not None or ranks is not None or (output.json and not chosen.is_plain):
        raise BadInput("--steps, --ranks and --json belong to --card.", hint="Add --card h100, or leave them out.")
    summaries: list[Summary] = []

    def recorded(run: Measurement, file: Path) -> None:
        summaries.append(summarize(run, name=str(file)))
        if chosen.is_plain and not output.json:
            print_lines(summary_lines(summaries[-1]))
            sys.stdout.flush()
        elif not chosen.is_plain:  # stdout is the script's own
            print_lines(summary_lines(summaries[-1]), CleanConsole(stderr=True, highlight=False))

    under_watch(request, path, arguments or [], chosen, recorded)
    if output.json and summaries:  # else the imaginary card has answered
        print_json(summary_document(summaries[-1]))


def under_watch(
    request: OnCardRequest,
    script: Path,
    arguments: list[str],
    chosen: Chosen,
    recorded: Callable[[Measurement, Path], None],
    on_card: OnCardAnswer = None,
) -> None:
    """Runs the script in this process, with the chosen steps recorded. Raises BadInput if no step was.

    If the script asks for a GPU and there is none, it runs on an imaginary card. Raises BadInput if neither is here.
    """
    from explorer.own_loop.on_card import check_cuda_build

    try:
        with redirect_stdout(sys.stderr if request.json else sys.stdout):
            _watch(script, arguments, chosen, recorded)
    except Exception as error:  # torch's CUDA build is not even imported without a driver
        if not asks_for_cuda(error):
            raise
        check_cuda_build(script)
        _say_now(f"{script} asks for a GPU, and there is none here: it runs on an imaginary {request.card}.")
        _on_card(request, script, arguments, on_card)


def _watch(script: Path, arguments: list[str], chosen: Chosen, recorded: Callable[[Measurement, Path], None]) -> None:
    steps = chosen.steps()
    from explorer.own_loop.script import ScriptUnderWatch  # torch: no other verb needs it in this process

    watched = ScriptUnderWatch(
        script,
        is_module=chosen.module,
        at=steps,
        steady=chosen.is_plain,
        recorded=recorded,
        last="last" in (chosen.at or ()),
        worst_of=chosen.worst_of,
        on_oom=chosen.on_oom,
        files=chosen.out,
        stop=chosen.stop,
        say=_say_now,
    )
    try:
        watched.run(arguments)
    except SystemExit as ended:  # `sys.exit(main())` ends most scripts that are well
        if ended.code:
            raise
    except KeyboardInterrupt:
        raise _interrupted(watched) from None
    except ExplorerError:
        raise
    except Exception as error:  # the script's own, shown as Python shows it
        if asks_for_cuda(error):
            raise
        print_exception(error)
        sys.stdout.flush()
        raise typer.Exit(DIFFERENT) from None
    if not watched.found_model:
        raise BadInput(
            f"{script} made no optimizer of a model's parameters, so no step could be found.",
            hint="Put explorer.watch(model) or explorer.record_step(model) into it.",
        )
    _check_written(script, watched, chosen)


def _check_written(script: Path, watch: ScriptUnderWatch, chosen: Chosen) -> None:
    """Raises BadInput for requested steps without a file."""
    missed = [f"step {step}" for step in chosen.steps() if step not in watch.written]
    if chosen.is_plain and not watch.written:
        missed = ["any"]
    if missed:
        n_taken, which = count(watch.n_steps, "step"), listed(missed)
        raise BadInput(
            f"{script} took {n_taken}; no file was written of {which}.",
            hint="Steps are counted from 1, by the optimizer; a warning says why one that was taken is missing.",
        )


def _say_now(text: str) -> None:
    """A training may go on for days: what is said must not wait in a buffer."""
    say(escape(text))
    sys.stdout.flush()


def _interrupted(watch: ScriptUnderWatch) -> typer.Exit:
    files = [f"step {step} in {path}" for step, path in watch.written.items()]
    _say_now(f"Interrupted after {count(watch.n_steps, 'step')}. Kept: {listed(files) or 'no record'}.")
    return typer.Exit(COULD_NOT_RUN)


def _on_card(request: OnCardRequest, script: Path, arguments: list[str], on_card: OnCardAnswer = None) -> None:
    """Runs the script on imaginary cards, in processes of their own, and prints what it held there."""
    from explorer.own_loop.on_card import steps_on_card

    ranks = steps_on_card(request, script, arguments)
    fullest = max(ranks, key=lambda rank: (bool(rank.refusal), max(rank.peaks, default=(0, 0))))
    for rank in ranks:
        if rank.file:
            say(escape(f"Wrote the last step to {rank.file}."))
    summary = None if fullest.last is None else summarize(fullest.last, name=fullest.file)
    if request.json:
        step = summary and summary_document(summary)
        print_json({**fullest.document, "step": step, "ranks": [rank.document for rank in ranks]})
    else:
        _print_steps(ranks, fullest, script.name)
        if summary is not None:
            print_lines(summary_lines(summary))
        if fullest.refusal:
            printed = summary.failure if summary else ""
            print_lines([("Then" if printed else "Refused", fullest.refusal.removeprefix(printed).strip())])
    if on_card is not None:
        on_card(fullest.last)
    if fullest.refusal:
        raise typer.Exit(DIFFERENT)


def _print_steps(ranks: list[StepsOnCard], fullest: StepsOnCard, script: str) -> None:
    lines = [
        f"{script} on {fullest.card}: torch's own CUDA code.",
        "No kernel ran: values are zeros, no time is known.",
    ]
    for number, result in enumerate(ranks):
        rank = f"Rank {number}, step" if len(ranks) > 1 else "Step"
        for step, (allocated, reserved) in enumerate(result.peaks, 1):
            lines.append(f"{rank} {step}: {mib(allocated)} allocated, {mib(reserved)} reserved")
        if result.refusal and result is not fullest:
            lines.append(f"{rank} {len(result.peaks) + 1} was refused too")
    lines += filter(None, [fullest.decided])
    if fullest.last is not None:
        lines += checkpointing_lines(fullest.last)
    answer_console().print("\n".join(lines), markup=False)
