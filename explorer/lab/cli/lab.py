"""`python -m explorer lab [NAME]` runs an experiment."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated, Literal

import typer
from rich.markup import escape

from explorer.cli.command import Output, answer_console, print_json, table_of, verb
from explorer.cli.worker import ask, worker
from explorer.lab.jobs import RunLab
from explorer.lab.plan import lesson_called, lessons, settings
from explorer.lab.record import LabOutcome, Lesson
from explorer.lab.view.outcome import lab_origins, lab_table
from explorer.plan.recognize import set_pairs
from explorer.record.graph import ModelRef

Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="An experiment; without it they are listed.")]
LabModel = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="For an experiment that takes a model, such as derivatives.")
]
Switches = Annotated[
    list[str] | None, typer.Option("--set", metavar="SWITCH=VALUE", help="Flips a switch; may be given repeatedly.")
]
Where = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where the experiment runs.")]


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
