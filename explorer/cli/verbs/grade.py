"""`python -m explorer grade [CHALLENGE]` marks a policy by a real run."""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec.structs import replace
from rich.markup import escape

from explorer.cli.command import DIFFERENT, Output, RunFailed, answer_console, print_json, table_of, verb
from explorer.cli.options import PolicyName, describe, file_on
from explorer.cli.worker import ask, worker
from explorer.errors import BadInput, nearest
from explorer.jobs.protocol import Compare
from explorer.plan.challenges import CHALLENGES, marks

ChallengeName = Annotated[str | None, typer.Argument(metavar="[CHALLENGE]", help="Without it they are listed.")]
_SIGNS = {True: "[green]met[/]     ", False: "[bold red]not met[/] ", None: "[yellow]unknown[/] "}


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
