"""The report of a pipelined run for a terminal: the step, what every rank held, and what splitting moved."""

from __future__ import annotations

from typing import Literal

from rich import box
from rich.markup import escape
from rich.table import Table

from explorer.cli.command import answer_console
from explorer.record.pipeline_run import PipelineRun
from explorer.record.plan import JointPlan
from explorer.view.drawing.units import mib, percent
from explorer.view.words.pipeline import cap_kept, cap_outcome


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
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1))
    state = f"{run.spec.optimizer} state"
    for name in ("rank", "stages", "peak", "predicted", "at", "receive buffers", state, "bubble"):
        table.add_column(name, justify="left" if name in ("rank", "stages", "at") else "right")
    predicted = {memory.rank: memory.peak_bytes for memory in run.predicted.memory} if run.predicted else {}
    assert run.timing is not None
    bubbles = {use.rank: use.bubble_fraction for use in run.timing.ranks}
    for memory in run.memory:
        stages = ", ".join(str(stage.stage) for stage in run.stages if stage.rank == memory.rank)
        table.add_row(
            str(memory.rank),
            stages,
            mib(memory.peak_bytes),
            mib(predicted.get(memory.rank)),
            memory.peak_action,
            mib(memory.receive_bytes),
            mib(memory.optimizer_bytes),
            percent(bubbles[memory.rank]),
        )
    return table


def _truth_table(run: PipelineRun) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1))
    table.add_column("gradients")
    for name in ("bitwise equal", "rounding", "different", "never came", "furthest"):
        table.add_column(name, justify="right")
    shares: tuple[Literal["microbatching", "recompute", "splitting"], ...] = ("microbatching", "recompute", "splitting")
    for share in shares:
        diffs = [getattr(entry, share) for entry in run.gradients]
        lost = sum(diff.presence == "baseline only" for diff in diffs)
        far = sum(diff.verdict == "different" for diff in diffs) - lost
        near = sum(diff.verdict == "rounding" for diff in diffs)
        worst = max((diff.relative_norm for diff in diffs if diff.relative_norm is not None), default=None)
        table.add_row(
            f"moved by {share}",
            f"{sum(diff.bitwise for diff in diffs)} of {len(diffs)}",
            *(str(n) for n in (near, far, lost)),
            "none known" if worst is None else f"{worst:.2g}",
        )
    return table
