"""`python -m explorer arena MODEL`: planners side by side, foreseen and measured, each with its gradient's verdict."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from explorer.cli.command import DIFFERENT, Output, answer_console, answered, print_json, verb
from explorer.cli.options import KeepOptions, Model, ModelOptions, StepOptions
from explorer.cli.worker import ask, check_writable, save_run_file, worker
from explorer.jobs.protocol import RunArena
from explorer.plan.arena.table import OURS, chosen, parse_shares, rivals
from explorer.record.arena import ARENA_REPEATS, Arena, Bout
from explorer.record.base import to_plain
from explorer.record.policy import KEEP_ALL
from explorer.view.compare.arena import at_budget, beaten_sentence, outcome_in_words, time_in_words
from explorer.view.drawing.units import mib, percent, percent_whole

_VERDICTS = {"bitwise equal": "green", "rounding": "yellow"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArenaOptions:
    """Who takes part, and under what."""

    budgets: Annotated[
        str, typer.Option(metavar="SHARES", help="Of the peak with everything kept, such as 0.3,0.5,0.7,0.9.")
    ] = "0.5,0.7"
    only: Annotated[
        str, typer.Option(metavar="RIVALS", help="Names with commas, such as greedy,rotor,explorer; all without it.")
    ] = ""


@verb
def arena(
    model: Model, options: ModelOptions, step: StepOptions, asked: ArenaOptions, keep: KeepOptions, output: Output
) -> None:
    """Every planner under every budget, on real steps taken in turns. Exit 1: this explorer's is beaten.

    Beaten is who lies behind with nearly every step. Where times are mixed, or fewer than eight, it is undecided.
    """
    shares = parse_shares(asked.budgets)
    only = tuple(name.strip() for name in asked.only.split(",") if name.strip())
    chosen(only)
    check_writable(keep.save)
    spec = step.spec(options.ref(model), KEEP_ALL, seed=options.seed, n_repeats=ARENA_REPEATS)
    with worker() as engine:
        outcome = ask(engine, RunArena(spec=spec, shares=shares, only=only), keep=not keep.no_store)
    assert isinstance(outcome, Arena)
    if output.json:
        print_json(_document(outcome))
    else:
        print_arena(outcome)
    with answered(output):
        if keep.save is not None:
            save_run_file(outcome, keep.save)
    if outcome.beaten(OURS):
        raise typer.Exit(DIFFERENT)


def print_arena(outcome: Arena) -> None:
    """One row a rival and budget, then what is to be said about them."""
    console = answer_console()
    console.print(f"\n[bold]{escape(outcome.spec.model.target)}[/]")
    origin = "measured" if outcome.ground.is_measured else "predicted from a run with recompute"
    console.print(f"[dim]everything kept: {mib(outcome.ground.peak_bytes)}, {origin}[/]")
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1))
    for name in ("planner", "budget", "peak foreseen", "measured", "time foreseen", "measured", "gradients"):
        table.add_column(name, justify="left" if name in ("planner", "gradients") else "right")
    for bout in outcome.bouts:
        table.add_row(*_cells(bout))
    console.print(table)
    remarks: dict[str, None] = {}
    for bout in outcome.bouts:
        if sentence := outcome_in_words(bout):
            remarks[f"  [dim]{escape(_name(bout))}:[/] {escape(sentence)}"] = None
    for line in remarks:
        console.print(line)
    console.print(f"\n{escape(beaten_sentence(outcome))}\n")


def _cells(bout: Bout) -> tuple[str, ...]:
    colour = _VERDICTS.get(bout.verdict or "", "red" if bout.verdict else "dim")
    missed = "[bold red]" if bout.fits is False else ""
    return (
        escape(rivals()[bout.rival].title if bout.rival in rivals() else bout.rival),
        "" if bout.share is None else percent_whole(bout.share),
        mib(bout.predicted_peak_bytes),
        f"{missed}{mib(bout.step_peak_bytes)}" if bout.ran else "[dim]none[/]",
        "" if bout.predicted_time_ratio is None else percent(bout.predicted_time_ratio - 1, signed=True),
        "" if bout.time_ratio is None else time_in_words(bout.time_ratio, bout.time_ratio_spread),
        f"[{colour}]{bout.verdict or ''}[/]",
    )


def _name(bout: Bout) -> str:
    return f"{bout.rival}{at_budget(bout)}"


def _document(outcome: Arena) -> dict[str, Any]:
    bouts = [{**to_plain(bout), **bout.headlines()} for bout in outcome.bouts]
    beaten, undecided = (
        [{"share": mine.share, "by": other.rival} for mine, other in pairs]
        for pairs in (outcome.beaten(OURS), outcome.undecided(OURS))
    )
    return {**to_plain(outcome), "bouts": bouts, "beaten": beaten, "undecided": undecided}
