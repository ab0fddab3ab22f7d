"""`python -m explorer lab [NAME]`: lists the experiments, or runs an experiment and prints its findings."""

from __future__ import annotations

from itertools import groupby
from textwrap import fill
from typing import Annotated, Literal

import typer
from rich.markup import escape

from explorer.cli.command import Output, answer_console, print_json, table_of, verb
from explorer.cli.options import set_pairs
from explorer.cli.worker import ask, worker
from explorer.jobs.protocol import RunLab
from explorer.plan.lessons import lesson_called, lessons, settings
from explorer.record.graph import ModelRef
from explorer.record.lab import LabOutcome, Lesson
from explorer.view.lab import lab_origins, lab_table

WIDTH = 100

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
        _list(output)
        return
    lesson = lesson_called(name)
    chosen = settings(lesson, set_pairs(set))
    with worker() as engine:
        ref = None if model is None else ModelRef(target=model)
        outcome = ask(engine, RunLab(name=name, switches=chosen, device=device, model=ref))
    if output.json:
        print_json(outcome)
    else:
        _print(lesson, outcome)


def _list(output: Output) -> None:
    if output.json:
        print_json(lessons())
        return
    console = answer_console()
    for theme, shelf in groupby(lessons(), key=lambda lesson: lesson.theme):
        console.print(f"\n[bold]{theme}[/]")
        console.print(table_of({"experiment": lesson.name, "question": lesson.question} for lesson in shelf))
    console.print("\n[dim]`python -m explorer lab NAME` runs one; --set SWITCH=VALUE flips a switch.[/]")


def _print(lesson: Lesson, outcome: LabOutcome) -> None:
    console = answer_console()
    width = min(WIDTH, console.width)
    console.print(f"\n[bold]{lesson.title}[/]\n[italic]{lesson.question}[/]\n")
    for paragraph in lesson.paragraphs:
        console.print(escape(fill(paragraph, width)))
        console.print()
    for switch in lesson.switches:
        value = outcome.switches[switch.name]
        others = ", ".join(f"{switch.name}={other}" for other in switch.values if other != value)
        console.print(f"  {switch.question} [bold]{escape(switch.label(value))}[/] [dim](--set {escape(others)})[/]")
    console.print()
    console.print(table_of(lab_table(outcome)))
    origins = lab_origins(outcome)
    for origin in dict.fromkeys(origins.values()):
        console.print(f"[dim]{origin}: {escape(', '.join(name for name in origins if origins[name] == origin))}[/]")
    if outcome.printed:
        console.print(escape(outcome.printed), style="dim")
    console.print("[bold]What to take away[/]")
    for finding in outcome.findings:
        console.print(escape(fill(finding, width, initial_indent="• ", subsequent_indent="  ")))
    console.print(f"\n[dim]A real run of {outcome.seconds:.1f} s on {outcome.device}.[/]")
