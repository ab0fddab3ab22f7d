"""Reports of a run for a terminal: the same headline figures as the page, with unit and origin, then block by block."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from explorer.cli.command import answer_console
from explorer.plan.why.caveats import beside_peak
from explorer.record.base import to_plain
from explorer.record.comparison import Comparison, TensorDiff
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy
from explorer.view.compare.cost import uncounted_in_words
from explorer.view.compare.gradients import moved_sentence, scope_sentence
from explorer.view.compare.headline import headlines
from explorer.view.drawing.block_rows import chart_rows, row_sum
from explorer.view.drawing.rows import Row
from explorer.view.drawing.units import NOT_MEASURED, count, flops, mib
from explorer.view.words.cut_short import what_failed
from explorer.view.words.policy import in_words

_TONES = {"good": "green", "bad": "red", "neutral": "default"}
_VERDICTS = {
    "bitwise equal": "green",
    "rounding": "yellow",
    "state moved": "bold magenta",
    "different": "bold red",
    "not comparable": "bold red",
}


def document(record: Comparison | Measurement) -> dict[str, Any]:
    """The record with its derived headline figures and the caveats of its peak beside its fields. In a comparison each
    run carries its own."""
    plain: dict[str, Any] = to_plain(record)
    if isinstance(record, Comparison):
        runs = {"baseline": document(record.baseline), "candidate": document(record.candidate)}
        return {**record.headlines(), **plain, **runs}
    return {**figures(record), **plain}


def figures(run: Measurement) -> dict[str, Any]:
    """The headline figures of one run, and what its peak does not say by itself."""
    return {**run.headlines(), "caveats": beside_peak(run)}


def print_measurement(run: Measurement) -> None:
    """To stdout."""
    console = answer_console()
    _title(console, run, run.spec.policy)
    _figures(console, run)
    if run.failure is None:
        phase = f", in {run.peak_phase}" if run.peak_phase else ""
        origin = " Predicted: nothing was allocated or run." if run.origin == "predicted" else ""
        console.print(f"  [dim]The peak is {mib(run.step_peak_bytes)}{phase}.{origin}[/]\n")
        console.print(_block_table(run))
    else:
        where = f" in {escape(run.failed_in)}" if run.failed_in else ""
        console.print(f"  [bold red]Failed[/]{where}: the step has no peak, only what was held until then.\n")
    _warnings(console, run)


def print_comparison(comparison: Comparison) -> None:
    """To stdout."""
    console = answer_console()
    _title(console, comparison.candidate, comparison.candidate.spec.policy)
    _figures(console, comparison)
    if not comparison.comparable:
        failed = escape(what_failed(comparison))
        console.print(f"  [bold red]Failed[/]   the {failed}: nothing is bought, and nothing is proven.\n")
    colour = _VERDICTS[comparison.verdict]
    console.print(f"  [bold]Verdict[/]  [{colour}]{comparison.verdict}[/]{_scope(comparison)}\n")
    if comparison.moved_twice:
        console.print(f"  [bold]Moved[/]    {escape(moved_sentence(comparison))}")
    if (worst := comparison.worst) is not None:
        console.print(f"  [bold]Worst[/]    {escape(worst.name)}: {_distance(worst)}")
    for cause in comparison.causes:
        console.print(f"  [bold]Likely[/]   {escape(cause)}")
    if comparison.not_reproducible_because:
        console.print(f"  [bold]Why[/]      {escape(comparison.not_reproducible_because)}")
    if scope := scope_sentence(comparison):
        console.print(f"  [bold]Scope[/]    {escape(scope)}")
    if comparison.worst is not None or comparison.causes:
        console.print()
    if comparison.comparable:
        console.print(_block_table(comparison.candidate, comparison.baseline))
    _warnings(console, comparison.candidate)


def _title(console: Console, run: Measurement, policy: Policy) -> None:
    spec, environment = run.spec, run.environment
    model = " ".join(filter(None, (spec.model.target, spec.model.size)))
    extra = "" if spec.autocast == "none" else f", autocast {spec.autocast}"
    console.print(
        f"\n[bold]{escape(model)}[/]  [dim]{escape(environment.device_name)}, torch {environment.torch_version}, ",
        end="",
    )
    types, threads = run.dtype or spec.dtype, count(environment.n_threads, "thread")
    console.print(f"[dim]{types}{extra}, {spec.optimizer}, {spec.mode} mode, {threads}[/]")
    console.print(f"[dim]{'Forward alone' if spec.forward_only else f'Policy: {escape(in_words(policy))}'}[/]\n")


def _figures(console: Console, run: Comparison | Measurement) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2))
    for figure in headlines(run):
        tone = _TONES[figure.tone]
        origin = "" if figure.value == NOT_MEASURED else ", ".join(figure.origin)
        table.add_row(
            figure.label, f"[bold]{escape(figure.value)}[/]", f"[{tone}]{escape(figure.delta)}[/]", f"[dim]{origin}[/]"
        )
    console.print(table)
    if left_out := uncounted_in_words(run.candidate if isinstance(run, Comparison) else run):
        console.print(f"  [yellow]{escape(left_out)}.[/]")
    for caveat in beside_peak(run.candidate if isinstance(run, Comparison) else run):
        console.print(f"  [yellow]{escape(caveat)}[/]")
    console.print()


def _block_table(run: Measurement, baseline: Measurement | None = None) -> Table:
    """One line a block; consecutive blocks with the same figures share one."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1))
    table.add_column("block", overflow="fold")  # a narrow terminal breaks names, never numbers
    for name in ("saved after\nforward", "forward", "recompute", "runs\nagain"):
        table.add_column(name, justify="right", no_wrap=True)
    lines = [(row.label, _cells(row, run, baseline)) for row in chart_rows(run)]
    for (_, cells), group in groupby(lines, key=lambda line: (line[0].rpartition(".")[0], line[1])):
        labels = [label for label, _ in group]
        label = labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1].rpartition('.')[2]}, each"
        table.add_row(escape(label), *cells, style="cyan" if cells[-1] else None)
    return table


def _cells(row: Row, run: Measurement, baseline: Measurement | None) -> tuple[str, ...]:
    again = row_sum(run, row, "n_recompute")
    saved = mib(row_sum(run, row, "saved_after_forward_bytes"))
    kept = saved if baseline is None else mib(row_sum(baseline, row, "saved_after_forward_bytes"))
    return (
        saved if kept == saved else f"{kept} → {saved}",
        flops(row_sum(run, row, "forward_flops")),
        flops(row_sum(run, row, "recompute_flops")) if again else "",
        f"×{again}" if again else "",
    )


def _scope(comparison: Comparison) -> str:
    """What was compared, for the line of the verdict."""
    parts = [
        (comparison.n_gradients, "gradient", ""),
        (len(comparison.input_gradients), "input gradient", ""),
        (len(comparison.buffers), "buffer", ""),
        (len(comparison.parameters), "parameter", f" after {count(comparison.n_steps, 'step')}"),
        (len(comparison.rng), "random generator", ""),
        (comparison.n_carried, "remembered value", ""),
    ]
    compared = [count(n, what) + after for n, what, after in parts if n]
    compared += ["the output in eval mode"] if comparison.eval_output else []
    return f"  [dim]over {', '.join(compared)}[/]" if compared else ""


def _distance(diff: TensorDiff) -> str:
    if diff.presence != "both":
        return f"in the {diff.presence}"
    if diff.n_nonfinite_mismatch:
        return f"{count(diff.n_nonfinite_mismatch, 'element')} finite on one side only"
    if diff.n_nonfinite:
        return f"{count(diff.n_nonfinite, 'element')} not finite"
    parts = []
    if diff.relative_norm is not None:
        parts.append(f"relative distance {diff.relative_norm:.2g}")
    if diff.max_abs is not None:
        parts.append(f"largest difference {diff.max_abs:.2g}")
    return ", ".join(parts) or diff.verdict


def _warnings(console: Console, run: Measurement) -> None:
    for warning in run.warnings:
        console.print(f"  [yellow]Warning[/]  {escape(warning)}")


def in_short(blocks: tuple[str, ...]) -> str:
    """Up to four names, else the first, the last and how many there are."""
    return ", ".join(blocks) if len(blocks) <= 4 else f"{blocks[0]} ... {blocks[-1]} ({count(len(blocks), 'block')})"
