"""Reports of a run for a terminal: the same headline figures as the page, with unit and origin, then block by block."""

from __future__ import annotations

from itertools import groupby
from typing import Any, get_args

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from explorer.cli.command import answer_console, table_of
from explorer.plan.why.caveats import beside_peak
from explorer.record.base import to_plain
from explorer.record.comparison import Comparison, GradientDiff, TensorDiff
from explorer.record.measurement import Measurement
from explorer.record.pipeline_run import PipelineRun, Share
from explorer.record.plan import JointPlan
from explorer.record.policy import Policy
from explorer.view.compare.cost import uncounted_in_words
from explorer.view.compare.gradients import moved_sentence, scope_sentence
from explorer.view.compare.headline import headlines
from explorer.view.drawing.rows import Row, chart_rows, row_sum
from explorer.view.drawing.units import NOT_MEASURED, count, flops, mib, percent
from explorer.view.text.pipeline import cap_kept, cap_outcome
from explorer.view.text.plan import in_words
from explorer.view.text.runs import what_failed

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
    run has its caveats."""
    plain: dict[str, Any] = to_plain(record)
    if isinstance(record, Comparison):
        runs = {"baseline": document(record.baseline), "candidate": document(record.candidate)}
        return {**record.headlines(), **plain, **runs}
    return {**figures(record), **plain}


def figures(run: Measurement) -> dict[str, Any]:
    """The headline figures of a run, and the caveats of its peak."""
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
    """A table with a line per block; consecutive blocks with the same figures share a line."""
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
    """The compared tensors in words, for the line of the verdict."""
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
    """Up to four names, else the first name, the last name and the count."""
    return ", ".join(blocks) if len(blocks) <= 4 else f"{blocks[0]} ... {blocks[-1]} ({count(len(blocks), 'block')})"


def print_pipeline(run: PipelineRun, joint: JointPlan | None = None) -> None:
    """To stdout; `joint` is the plan that chose cuts and policy, if one did."""
    console = answer_console()
    plan = run.spec.plan
    assert plan is not None
    shape = (
        f"{len(plan.stages)} stages on {len(run.rows)} ranks, {plan.schedule_name}, {plan.n_microbatches} microbatches"
    )
    where = f"[dim]{run.engine}, {escape(run.environment.device_name)}[/]"
    console.print(f"\n[bold]{escape(run.spec.model.target)}[/]  {shape}  {where}\n", soft_wrap=True)
    if run.timing is not None:
        how = "wall time of the ranks, links included" if run.wall is not None else "measured actions, composed"
        predicted = f", predicted {run.predicted.makespan_ms:.1f} ms" if run.predicted else ""
        console.print(
            f"  step [bold]{run.timing.makespan_ms:.1f} ms[/] [dim]{how}{predicted}[/]   "
            f"bubble [bold]{percent(run.timing.bubble_fraction)}[/]"
        )
        console.print(_rank_table(run))
        console.print("  [dim]peak: of forward and backward; the optimizer's state, counted, comes on top.[/]\n")
    if joint is not None and (outcome := cap_outcome(run, joint)):
        console.print(f"  [{'green' if cap_kept(run, joint) else 'bold red'}]{escape(outcome)}[/]\n")
    if run.gradients:
        console.print(_truth_table(run))
    for note in run.notes:
        console.print(f"  [dim]{escape(note)}[/]", soft_wrap=True)


def _rank_table(run: PipelineRun) -> Table:
    state = f"{run.spec.optimizer} state"
    predicted = {memory.rank: memory.peak_bytes for memory in run.predicted.memory} if run.predicted else {}
    assert run.timing is not None
    bubbles = {use.rank: use.bubble_fraction for use in run.timing.ranks}
    rows = (
        {
            "rank": str(memory.rank),
            "stages": ", ".join(str(stage.stage) for stage in run.stages if stage.rank == memory.rank),
            "peak": mib(memory.peak_bytes),
            "predicted": mib(predicted.get(memory.rank)),
            "at": memory.peak_action,
            "receive buffers": mib(memory.receive_bytes),
            state: mib(memory.optimizer_bytes),
            "bubble": percent(bubbles[memory.rank]),
        }
        for memory in run.memory
    )
    return table_of(rows, right=("peak", "predicted", "receive buffers", state, "bubble"))


def _truth_table(run: PipelineRun) -> Table:
    shares: tuple[Share, ...] = get_args(Share)
    rows = [_share_row(share, [getattr(entry, share) for entry in run.gradients]) for share in shares]
    return table_of(rows, right=tuple(rows[0])[1:])


def _share_row(share: Share, diffs: list[GradientDiff]) -> dict[str, str]:
    lost = sum(diff.presence == "baseline only" for diff in diffs)
    worst = max((diff.relative_norm for diff in diffs if diff.relative_norm is not None), default=None)
    return {
        "gradients": f"moved by {share}",
        "bitwise equal": f"{sum(diff.bitwise for diff in diffs)} of {len(diffs)}",
        "rounding": str(sum(diff.verdict == "rounding" for diff in diffs)),
        "different": str(sum(diff.verdict == "different" for diff in diffs) - lost),
        "never came": str(lost),
        "furthest": "none known" if worst is None else f"{worst:.2g}",
    }
