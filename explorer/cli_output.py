"""Reports of a run for a terminal: the same headline figures as the page, with unit and origin, then block by block."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from explorer.record.base import to_plain
from explorer.record.comparison import Comparison, TensorDiff
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy
from explorer.view.blocks import chart_rows, row_sum
from explorer.view.headline import headlines
from explorer.view.rows import Row
from explorer.view.units import count, flops, mib

_TONES = {"good": "green", "bad": "red", "neutral": "default"}
_VERDICTS = {"bitwise equal": "green", "rounding": "yellow", "different": "bold red", "not comparable": "bold red"}


def document(record: Comparison | Measurement) -> dict[str, Any]:
    """The record with its derived headline figures beside its fields. In a comparison each run carries its own."""
    plain: dict[str, Any] = to_plain(record)
    if isinstance(record, Comparison):
        runs = {"baseline": document(record.baseline), "candidate": document(record.candidate)}
        return {**record.headlines(), **plain, **runs}
    return {**record.headlines(), **plain}


def print_measurement(run: Measurement, graph_title: str = "") -> None:
    """To stdout."""
    console = Console(highlight=False, soft_wrap=True)
    _title(console, run, run.spec.policy)
    _figures(console, run)
    if run.failure is None:
        phase = f", in {run.peak_phase}" if run.peak_phase else ""
        console.print(f"  [dim]The peak is {mib(run.step_peak_bytes)}{phase}.[/]\n")
        console.print(_block_table(run))
    _warnings(console, run)


def print_comparison(comparison: Comparison) -> None:
    """To stdout."""
    console = Console(highlight=False, soft_wrap=True)
    _title(console, comparison.candidate, comparison.candidate.spec.policy)
    _figures(console, comparison)
    colour = _VERDICTS[comparison.verdict]
    console.print(f"  [bold]Verdict[/]  [{colour}]{comparison.verdict}[/]{_scope(comparison)}\n")
    if (worst := comparison.worst) is not None:
        console.print(f"  [bold]Worst[/]    {escape(worst.name)}: {_distance(worst)}")
    for cause in comparison.causes:
        console.print(f"  [bold]Likely[/]   {escape(cause)}")
    if comparison.not_reproducible_because:
        console.print(f"  [bold]Why[/]      {escape(comparison.not_reproducible_because)}")
    if comparison.worst is not None or comparison.causes:
        console.print()
    if comparison.failure is None:
        console.print(_block_table(comparison.candidate, comparison.baseline))
    _warnings(console, comparison.candidate)


def _title(console: Console, run: Measurement, policy: Policy) -> None:
    spec, environment = run.spec, run.environment
    model = " ".join(filter(None, (spec.model.target, spec.model.size)))
    extra = "" if spec.autocast == "none" else f", autocast {spec.autocast}"
    console.print(f"\n[bold]{escape(model)}[/]  [dim]{escape(environment.device_name)}, torch {environment.torch_version}, ", end="")
    console.print(f"[dim]{spec.dtype}{extra}, {spec.optimizer}, {spec.mode} mode, {count(environment.n_threads, 'thread')}[/]")
    console.print(f"[dim]Policy: {escape(in_words(policy))}[/]\n")


def in_words(policy: Policy) -> str:
    """`recompute 12 blocks: blocks.0 ... blocks.11`."""
    if not policy.units:
        return "keep all"
    named = policy.blocks
    listed = ", ".join(named) if len(named) <= 4 else f"{named[0]} ... {named[-1]}"
    segments = sum(len(unit.blocks) > 1 for unit in policy.units)
    joined = f" in {count(len(policy.units), 'unit')}" if segments else ""
    return f"recompute {count(len(named), 'block')}{joined}: {listed}"


def _figures(console: Console, run: Comparison | Measurement) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2))
    for figure in headlines(run):
        tone = _TONES[figure.tone]
        origin = "" if figure.value == "not measured" else ", ".join(figure.origin)
        table.add_row(figure.label, f"[bold]{escape(figure.value)}[/]", f"[{tone}]{escape(figure.delta)}[/]", f"[dim]{origin}[/]")
    console.print(table)
    console.print()


def _block_table(run: Measurement, baseline: Measurement | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", header_style="dim", padding=(0, 1))
    table.add_column("block")
    table.add_column("kept", justify="right") if baseline else None
    for name in ("saved after forward", "forward", "recompute", "runs again"):
        table.add_column(name, justify="right")
    for row in chart_rows(run):
        again = row_sum(run, row, "n_recompute")
        cells = [escape(row.label)]
        cells += [mib(row_sum(baseline, row, "saved_after_forward_bytes"))] if baseline else []
        cells += [
            mib(row_sum(run, row, "saved_after_forward_bytes")),
            flops(row_sum(run, row, "forward_flops")),
            flops(row_sum(run, row, "recompute_flops")) if again else "",
            f"×{again}" if again else "",
        ]
        table.add_row(*cells, style="cyan" if _is_recomputed(run, row) else None)
    return table


def _is_recomputed(run: Measurement, row: Row) -> bool:
    return any(run.by_fqn[fqn].n_recompute for fqn in row.fqns if fqn in run.by_fqn)


def _scope(comparison: Comparison) -> str:
    parts = [
        f"{comparison.n_bitwise_equal} of {count(len(comparison.gradients), 'gradient')}",
        f"{sum(diff.bitwise for diff in comparison.buffers)} of {count(len(comparison.buffers), 'buffer')}",
    ]
    said = " and ".join(part for part in parts if not part.startswith("0 of 0"))
    return f"  [dim]{said} bitwise equal[/]" if said else ""


def _distance(diff: TensorDiff) -> str:
    if diff.presence != "both":
        return f"in the {diff.presence}"
    if diff.n_nonfinite_mismatch:
        return f"{count(diff.n_nonfinite_mismatch, 'element')} finite on one side only"
    parts = []
    if diff.relative_norm is not None:
        parts.append(f"relative distance {diff.relative_norm:.2g}")
    if diff.max_abs is not None:
        parts.append(f"largest difference {diff.max_abs:.2g}")
    return ", ".join(parts) or diff.verdict


def _warnings(console: Console, run: Measurement) -> None:
    for warning in run.warnings:
        console.print(f"  [yellow]Warning[/]  {escape(warning)}")
