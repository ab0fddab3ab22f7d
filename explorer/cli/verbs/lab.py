"""`python -m explorer lab [NAME]` runs an experiment; `grade [CHALLENGE]` marks a policy by a real run."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Literal

import typer
from msgspec.structs import replace
from rich.markup import escape

from explorer.cli.command import DIFFERENT, Output, RunFailed, answer_console, print_json, table_of, verb
from explorer.cli.options import PolicyName, describe, file_on
from explorer.cli.worker import ask, worker
from explorer.errors import BadInput, nearest
from explorer.jobs.protocol import Compare, RunLab
from explorer.plan.catalogue import lesson_called, lessons, settings
from explorer.plan.challenges import CHALLENGES, marks
from explorer.plan.recognize import set_pairs
from explorer.record.graph import ModelRef
from explorer.record.lab import LabOutcome, Lesson
from explorer.view.lab import lab_origins, lab_table

Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="An experiment; without it they are listed.")]
LabModel = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="For an experiment that takes a model, such as derivatives.")
]
Switches = Annotated[
    list[str] | None, typer.Option("--set", metavar="SWITCH=VALUE", help="Flips a switch; may be given repeatedly.")
]
Where = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where the experiment runs.")]
ChallengeName = Annotated[str | None, typer.Argument(metavar="[CHALLENGE]", help="Without it they are listed.")]
_SIGNS = {True: "[green]met[/]     ", False: "[bold red]not met[/] ", None: "[yellow]unknown[/] "}


@verb
def lab(output: Output, name: Name = None, model: LabModel = None, set: Switches = None, device: Where = "cpu") -> None:
    """Experiments: short stories about checkpointing, each with a real run of seconds and what to take away."""
    if name is None:
        _list_lessons(output)
        return
    lesson = lesson_called(name)
    chosen = settings(lesson, set_pairs(set))
    with worker() as engine:
        ref = None if model is None else ModelRef(target=model)
        outcome = ask(engine, RunLab(name=name, switches=chosen, device=device, model=ref))
    if output.json:
        print_json(outcome)
    else:
        _print_outcome(lesson, outcome)


def _list_lessons(output: Output) -> None:
    if output.json:
        print_json(lessons())
        return
    console = answer_console()
    for theme, shelf in groupby(lessons(), key=lambda lesson: lesson.theme):
        console.print(f"\n[bold]{theme}[/]")
        console.print(table_of({"experiment": lesson.name, "question": lesson.question} for lesson in shelf))
    console.print("\n[dim]`python -m explorer lab NAME` runs one; --set SWITCH=VALUE flips a switch.[/]")


def _print_outcome(lesson: Lesson, outcome: LabOutcome) -> None:
    console = answer_console()
    console.print(f"\n[bold]{lesson.title}[/]\n[italic]{lesson.question}[/]\n")
    console.print(escape("\n\n".join(lesson.paragraphs)), soft_wrap=False)
    switches = [
        {
            "question": switch.question,
            "answer": switch.label(outcome.switches[switch.name]),
            "--set": f"{switch.name}={'|'.join(switch.values)}",
        }
        for switch in lesson.switches
    ]
    console.print(table_of(switches), table_of(lab_table(outcome)))
    origins = lab_origins(outcome)
    for origin in dict.fromkeys(origins.values()):
        console.print(f"[dim]{origin}: {escape(', '.join(name for name in origins if origins[name] == origin))}[/]")
    if outcome.printed:
        console.print(escape(outcome.printed), style="dim")
    for finding in outcome.findings:
        console.print(escape(f"• {finding}"), soft_wrap=False)


@verb
def grade(output: Output, name: ChallengeName = None, policy: PolicyName = "keep-all") -> None:
    """Challenges: a model, a peak and a price. Marks a policy by a real run. Exit 0: solved; 1: not solved."""
    if name is None:
        if output.json:
            print_json(tuple(CHALLENGES.values()))
        else:
            rows = ({"challenge": challenge.name, "task": challenge.task} for challenge in CHALLENGES.values())
            answer_console().print(table_of(rows))
        return
    if name not in CHALLENGES:
        names = f"There are {', '.join(CHALLENGES)}."
        raise BadInput(f"There is no challenge {name}.", hint=nearest(name, CHALLENGES) or names)
    challenge = CHALLENGES[name]
    with worker() as engine:
        graph = describe(engine, challenge.baseline)
        candidate = replace(challenge.baseline, policy=file_on(policy, graph).policy)
        run = ask(engine, Compare(baseline=challenge.baseline, candidate=candidate), keep=True)
    if run.failure is not None:
        raise RunFailed(run.failure)
    marked = marks(challenge, run)
    solved = all(mark.met for mark in marked)
    if output.json:
        print_json({"challenge": challenge, "solved": solved, "marks": marked})
    else:
        console = answer_console()
        console.print(f"\n{escape(challenge.task)}\n")
        for mark in marked:
            console.print(f"  {_SIGNS[mark.met]} {escape(mark.asked)}: {escape(mark.found)}")
        console.print("\n  [bold green]Solved.[/]\n" if solved else f"\n  Not solved yet. {escape(challenge.hint)}\n")
    if not solved:
        raise typer.Exit(DIFFERENT)
