"""Reports of a run for a terminal: the same headline figures as the page, with unit and origin, then block by block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from explorer.cli.command import Output, answer_console, print_json, say, table_of
from explorer.plan.memory.outside import outside_policies
from explorer.plan.summary import Line, forecast_document, forecast_lines
from explorer.plan.why.caveats import peak_caveats
from explorer.plan.why.checkpointing import not_comparable_because, sides
from explorer.plan.why.collectives import collective_rows, repeated, sent_bytes
from explorer.plan.why.peak import explain_one
from explorer.plan.why.worth import worth_recomputing
from explorer.record.base import to_plain
from explorer.record.card import CardMemory
from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph
from explorer.record.history import MemoryHistory
from explorer.record.measurement import Measurement, RecordedRanks
from explorer.record.plan import Wish, silent
from explorer.record.policy import Policy
from explorer.view.compare.cost import uncounted_in_words
from explorer.view.compare.gradients import compared_tensors, distance_with_largest, moved_sentence, scope_sentence
from explorer.view.compare.headline import headlines
from explorer.view.drawing.rows import chart_rows
from explorer.view.drawing.units import count, mib
from explorer.view.memory.ranks import rank_rows, spread_of_ranks
from explorer.view.text.plan import in_words
from explorer.view.text.runs import (
    alive_rows,
    card_rows,
    counted_text,
    history_notes,
    history_rows,
    refusal_rows,
    row_cells,
    rows_outside,
    what_failed,
)

if TYPE_CHECKING:
    from explorer.view.report.report import ReportOf

_LABEL = 10
"""Letters of a line's label."""
_TONES = {"good": "green", "bad": "red", "neutral": "default"}
_VERDICTS = {
    "bitwise equal": "green",
    "rounding": "yellow",
    "state moved": "bold magenta",
    "different": "bold red",
    "not comparable": "bold red",
}


def with_plans(of: ReportOf) -> ReportOf:
    """`of` with the plans for the budget of its page; unchanged if its page has no budget."""
    from explorer.plan.planners.front import find_plans
    from explorer.view.report.explorable import keep_all_run  # late, as the planners: no other report needs Plotly

    start, graph = keep_all_run(of.run, of.known_graph), of.known_graph
    if of.plans or start is None or graph is None:
        return of
    say("Looking for the cheapest policies along the budget.")
    return replace(of, plans=find_plans(start, graph, Wish(), silent).plans)


def document(record: Comparison | Measurement) -> dict[str, object]:
    """The record with its derived headline figures and the caveats of its peak beside its fields. In a comparison each
    run has its caveats."""
    plain: dict[str, object] = to_plain(record)
    if isinstance(record, Comparison):
        runs = {"baseline": document(record.baseline), "candidate": document(record.candidate)}
        return {**record.headlines(), **plain, **runs}
    return {**figures(record), **plain, **card_figures(record)}


def card_figures(run: Measurement) -> dict[str, object]:
    """The figures of the run's card and the refused request, which takes the key of the runs that were refused: a
    predicted run has none. Empty without a card."""
    return {} if run.card is None else {**run.card.headlines(), "refused": to_plain(run.card.refused)}


def figures(run: Measurement) -> dict[str, object]:
    """The headline figures of a run and of its card, and the caveats of its peak."""
    return {**run.headlines(), "caveats": peak_caveats(run), **card_figures(run)}


def print_model(target: str, batch: str) -> None:
    """To stdout: the model and its batch, the first line of an answer that has no other title."""
    text = f"  [dim]batch {escape(batch)}[/]" if batch else ""
    answer_console().print(f"[bold]{escape(target)}[/]{text}")


def print_lines(
    lines: Iterable[Line], console: Console | None = None, styles: Mapping[str, str] = MappingProxyType({})
) -> None:
    """To stdout: a label and a text each. On a terminal they are as wide as it is; in a pipe no line is broken.

    `styles`: the style of the lines with a label. A label that repeats the one before it is left out.
    """
    console, rows, last = console or answer_console(), list(lines), ""
    width = max(_LABEL, *(len(label) + 1 for label, _ in rows), 0)
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=width - 1, style="bold")
    table.add_column(overflow="fold")
    for label, text in rows:
        shown = label
        if label == last:
            shown = ""
        last = label
        if console.is_terminal:
            table.add_row(shown, escape(text), style=styles.get(label))
        else:
            console.print(escape(f"{shown:<{width}}{text}"), soft_wrap=True)
    if console.is_terminal:
        console.print(table)


def labelled(label: str, sentences: Iterable[str]) -> list[Line]:
    """A line for each sentence, all with the same label."""
    return [(label, sentence) for sentence in sentences]


def print_warnings(warnings: Iterable[str]) -> None:
    """To stdout, in yellow."""
    print_lines(labelled("Warning", warnings), styles={"Warning": "yellow"})


def answer_forecast(step: Measurement, policy: Policy, output: Output) -> None:
    """To stdout: a recorded step beside its forecast under `policy`."""
    if output.json:
        print_json({"baseline": figures(step), **forecast_document(step, policy)})
    else:
        print_lines(forecast_lines(step, policy))


def print_card(console: Console, memory: CardMemory, whose: str = "") -> None:
    """The figures of a card, a refused request in red; `whose`: the policy in words, of two."""
    title = f"On {escape(memory.card.name)}{whose and f', {whose}'}"
    console.print(f"\n[bold]{title}[/]  [dim]by the rules of torch's CUDA allocator[/]")
    print_lines(card_rows(memory).items(), console, {"Refused": "bold red"})


def print_record(record: Comparison | Measurement) -> None:
    """To stdout: the figures of the page's strip, the verdict of a comparison, and the blocks."""
    console = answer_console()
    run = record.candidate if isinstance(record, Comparison) else record
    _title(console, run)
    _figures(console, record, run)
    if isinstance(record, Comparison):
        if not record.is_predicted:
            print_lines(_verdict_lines(record), console, {"Verdict": _VERDICTS[record.verdict], "Failed": "bold red"})
        if record.comparable:
            console.print(_block_table(run, record.baseline))
    elif run.failure is None:
        phase = f", in {run.peak_phase}" if run.peak_phase else ""
        origin = " Predicted: nothing was allocated or run." if run.origin == "predicted" else ""
        lines = [("Peak", f"{mib(run.step_peak_bytes)}{phase}.{origin}")]
        print_lines([*lines, *labelled("Outside", outside_policies(run))], console)
        console.print(_block_table(run))
    else:
        where = run.failed_in and f" in {run.failed_in}"
        lines = [("Failed", f"The step{where}: it has no peak, only what was held until then.")]
        print_lines(lines, console, {"Failed": "bold red"})
    print_warnings(run.warnings)


def answer_step(
    run: Measurement, graph: ModelGraph | None, output: Output, counted: tuple[int, int] | None = None
) -> None:
    """To stdout: the step, which kinds of submodules are worth recomputing, and `counted`: the allocated and reserved
    peak of the same step on an imaginary card."""
    if output.json:
        print_json({**document(run), "worth_recomputing": worth_recomputing(run, graph), "counted": counted})
    else:
        print_record(run)
        if counted is not None and run.card is not None:
            print_lines([("Counted", counted_text(run.card, *counted))])
        print_worth(run, graph)


def print_worth(run: Measurement, graph: ModelGraph | None) -> None:
    """To stdout: which kinds of submodules are worth recomputing, and why the others are not."""
    if rows := worth_recomputing(run, graph):
        answer_console().print(table_of(rows))


def print_ranks(ranks: RecordedRanks) -> None:
    """To stdout: the ranks side by side, the fullest one's peak, and its collectives."""
    console, run = answer_console(), ranks.fullest
    _title(console, run)
    print_lines([("Peak", spread_of_ranks(ranks))])
    console.print(table_of(rank_rows(ranks)))
    print_lines(labelled("Why", explain_one(run)))
    if run.card is not None:
        print_card(console, run.card)
    if run.collectives:
        sent = f"{mib(sent_bytes(run))} sent by the ring algorithm"
        console.print(f"\n[bold]Collectives of rank {run.rank}[/]  {sent}\n")
        console.print(table_of(collective_rows(run)))
    print_warnings([*repeated(run), *run.warnings])


def _verdict_lines(comparison: Comparison) -> list[Line]:
    failed = (
        "" if comparison.comparable else f"The {what_failed(comparison)}: nothing is bought, and nothing is proven."
    )
    worst = comparison.worst
    lines = [
        ("Failed", "" if comparison.comparable else failed),
        ("Verdict", f"{comparison.verdict}  {compared_tensors(comparison)}".strip()),
        ("Moved", moved_sentence(comparison) if comparison.moved_twice or comparison.late_reads else ""),
        ("Worst", "" if worst is None else f"{worst.name}: {distance_with_largest(worst)}"),
        *labelled("Baseline", sides(comparison)),
        *labelled("Likely", comparison.causes),
        ("Why", not_comparable_because(comparison)),
        ("Scope", scope_sentence(comparison)),
    ]
    return [(label, text) for label, text in lines if text]


def _title(console: Console, run: Measurement) -> None:
    spec, environment = run.spec, run.environment
    model = " ".join(filter(None, (spec.model.target, spec.model.size)))
    extra = "" if spec.autocast == "none" else f", autocast {spec.autocast}"
    types, threads = run.dtype or spec.dtype, count(environment.n_threads, "thread")
    policy = "Forward alone" if spec.forward_only else f"Policy: {in_words(spec.policy)}"
    policy += "" if spec.ranks is None else f"\n{spec.ranks.in_words}"
    model_and_batch = f"[bold]{escape(model)}[/]  [dim]{f'batch {escape(run.batch)}, ' if run.batch else ''}"
    console.print(
        f"\n{model_and_batch}{escape(environment.device_name)}, torch {environment.torch_version}, "
        f"{types}{extra}, {spec.optimizer}, {spec.mode} mode, {threads}\n{escape(policy)}[/]\n"
    )


def _figures(console: Console, record: Comparison | Measurement, run: Measurement) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2))
    for figure in headlines(record):
        tone = _TONES[figure.tone]
        value, origin = f"[bold]{escape(figure.value)}[/]", f"[dim]{', '.join(figure.origin)}[/]"
        table.add_row(figure.label, value, f"[{tone}]{escape(figure.delta)}[/]", origin)
    console.print(table)
    if isinstance(record, Comparison) and record.baseline.card is not None:
        print_card(console, record.baseline.card, "everything kept")
    if run.card is not None:
        print_card(console, run.card, "the policy" if isinstance(record, Comparison) else "")
    left_out = uncounted_in_words(run)
    print_warnings([*([f"{left_out}."] if left_out else []), *peak_caveats(run)])
    console.print()


def _block_table(run: Measurement, baseline: Measurement | None = None) -> Table:
    """A table with a line per block; consecutive blocks with the same figures share a line. Its rows add up to the run.

    Bytes outside of these blocks have a row for each line of the user's code.
    """
    shown = chart_rows(run)
    lines = [(row.label, row_cells(row, run, baseline)) for row in shown]
    rows = []
    for (_, cells), group in groupby(lines, key=lambda line: (line[0].rpartition(".")[0], line[1])):
        labels = [label for label, _ in group]
        label = labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1].rpartition('.')[2]}, each"
        rows.append({"block": label, **cells})
    return table_of([*rows, *rows_outside(shown, run, baseline)])


def print_history(history: MemoryHistory) -> None:
    """To stdout: the peaks of each device as recorded and under other options, refusals, and what the peak holds."""
    console = answer_console()
    for device, run in zip(history.devices, history.runs):
        events = count(device.n_events, "event")
        console.print(f"\n[bold]{escape(device.label)}[/]  [dim]{events} that move memory[/]\n")
        console.print(table_of(history_rows(device)))
        for note in history_notes(device):
            console.print(f"[dim]{escape(note)}[/]")
        if device.refused:
            console.print(table_of(refusal_rows(device)))
        where = f", in {run.peak_phase}" if run.peak_phase else ""
        console.print(f"\nThe peak is {mib(run.held_peak_bytes)}{where}.\n")
        for by in ("module", "source line"):
            console.print(table_of(alive_rows(run, by)))
