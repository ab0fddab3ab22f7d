"""`fit MODEL --card 24GiB`: what would make a step fit, every lever played, priced and judged."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.markup import escape
from rich.table import Table

from explorer.cli.command import DIFFERENT, Output, answer_console, print_json, table_of, verb
from explorer.cli.options import Model, StepOptions, bounded, say_how_read
from explorer.cli.report import labelled, print_lines, print_model
from explorer.cli.worker import PartView, ask, worker
from explorer.errors import BadInput
from explorer.jobs.protocol import FindFit
from explorer.jobs.run_file import step_in
from explorer.plan import lever_text, levers
from explorer.plan.card.cards import parse_card
from explorer.plan.recorded_fit import recorded_fit
from explorer.record.base import to_plain
from explorer.record.card import Card
from explorer.record.fit import Fit, LeverRow


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions:
    """What the step has to fit, and which levers are shown."""

    card: Annotated[str | None, typer.Option(metavar="NAME|SIZE", help="A GPU, such as b200 or 24GiB.")] = None
    n_steps: Annotated[
        int | None, bounded(Card, "n_steps", "--steps", help="Steps on the card, if they do not repeat.")
    ] = None
    budget: Annotated[str | None, typer.Option(metavar="BUDGET", help="Limit of the peak: 1.5GiB, or 70%.")] = None
    bitwise: Annotated[bool, typer.Option("--bitwise", help="Hide what does not keep gradients bitwise.")] = False


@verb
def fit(model: Model, step: StepOptions, wish: FitOptions, output: Output) -> None:
    """What would make a step fit: each lever played, priced in FLOPs, its gradients judged. Exit 1: nothing fits."""
    spec, card = step.spec(model), None
    target = spec.model.target
    if wish.card is not None:
        card = parse_card(wish.card, "", "")
        card = card if wish.n_steps is None else replace(card, n_steps=wish.n_steps)
        spec = replace(spec, card=card)
    elif wish.n_steps is not None:
        raise BadInput("--steps are steps on a GPU, and no GPU is named.", hint="Add --card h100, or leave it out.")
    if wish.budget is not None:
        say_how_read(wish.budget, levers.check_budget(wish.budget))
    if (recorded := step_in(model)) is not None:
        answer: Fit = recorded_fit(recorded, card, wish.budget)
    else:
        with worker() as engine:
            parts = None
            if not output.json:
                parts = PartView(_table, lambda part: _print(target, _shown(part, wish)))
            answer = ask(engine, FindFit(spec=spec, budget=wish.budget), parts=parts)
    shown = _shown(answer, wish)
    if output.json:
        print_json(_document(shown))
    else:
        _print(target, shown)
    if not (shown.as_is.fits or any(row.step.fits for row in (*shown.rows, *shown.combinations))):
        raise typer.Exit(DIFFERENT)


def _shown(answer: Fit, wish: FitOptions) -> Fit:
    if wish.bitwise:
        return levers.bitwise_only(answer)
    return answer


def _document(fit: Fit) -> dict[str, object]:
    def row(row: LeverRow) -> dict[str, object]:
        ratio = levers.price(row.step, fit.as_is)
        derived = {
            "title": lever_text.title(row),
            "saved_bytes": fit.as_is.needed_bytes - row.step.needed_bytes,
            "flop_ratio": None if row.step.total_flops is None else ratio,
            "script": list(lever_text.script_lines(row)),
        }
        return {**derived, **to_plain(row)}

    rows, combinations = ([row(each) for each in rows] for rows in (fit.rows, fit.combinations))
    return {**to_plain(fit), "rows": rows, "combinations": combinations}


def _table(fit: Fit) -> Table:
    return table_of(lever_text.row_cells(row, fit.as_is) for row in (*fit.rows, *fit.combinations))


def _print(target: str, fit: Fit) -> None:
    console = answer_console()
    print_model(target, fit.batch)
    print_lines([("As it is", lever_text.as_is_text(fit))], console)
    for heading, rows in (("Single levers", fit.rows), ("Together", fit.combinations)):
        if rows:
            console.print(f"\n[bold]{heading}[/]")
            console.print(table_of(lever_text.row_cells(row, fit.as_is) for row in rows))
    if not fit.rows and not fit.missing:
        console.print("\nNo lever is left to show.")
    for row in (*fit.rows, *fit.combinations):
        console.print(f"[bold]{escape(lever_text.title(row))}[/]")
        for line in lever_text.script_lines(row):
            console.print(f"    {escape(line)}")
        if row.judgement.reason:
            console.print(f"    [dim]{escape(row.judgement.reason)}[/]")
    console.print()
    if fit.judged_on is not None or not fit.missing:
        print_lines([("Judged on", lever_text.judged_text(fit))], console)
    if fit.logits:
        print_lines([("Logits", fit.logits)], console)
    print_lines([("Left out", f"{row.lever}: {row.reason}") for row in fit.left_out], console)
    print_lines(labelled("Note", fit.warnings), console)
    if fit.missing:
        print_lines([("Missing", fit.missing)], console)
