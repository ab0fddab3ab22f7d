"""A pipeline's run for a terminal."""

from __future__ import annotations

from rich.markup import escape

from explorer.cli.command import answer_console, table_of
from explorer.pipeline.record.step import JointPlan, PipelineRun
from explorer.pipeline.view.gantt import rank_table
from explorer.pipeline.view.results import memory_chart, moved_rows
from explorer.pipeline.view.text import cap_outcome, within_cap
from explorer.view.drawing.units import percent


def print_pipeline(run: PipelineRun, joint: JointPlan | None = None, *, batch: str = "") -> None:
    """To stdout; `joint` is the plan that chose cuts and policy, if one did; `batch`: its types and shapes."""
    console = answer_console()
    plan = run.spec.plan
    assert plan is not None
    shape = f"{len(plan.stages)} stages on {len(run.rows)} ranks, {plan.schedule_name}"
    console.print(
        f"\n[bold]{escape(run.spec.model.target)}[/]  {shape}, {plan.n_microbatches} microbatches  "
        f"[dim]{f'batch {escape(batch)}, ' if batch else ''}{run.engine}, {escape(run.environment.device_name)}[/]\n"
    )
    if run.timing is not None:
        predicted = run.predicted
        how = "wall time of the ranks, links included" if run.wall is not None else "measured actions, composed"
        before = f", predicted {predicted.makespan_ms:.1f} ms" if predicted else ""
        console.print(
            f"  step [bold]{run.timing.makespan_ms:.1f} ms[/] [dim]{how}{before}[/]   "
            f"bubble [bold]{percent(run.timing.bubble_fraction)}[/]"
        )
        stages = [", ".join(str(s.stage) for s in run.stages if s.rank == memory.rank) for memory in run.memory]
        peaks = memory_chart(run.memory, predicted.memory if predicted else ()).rows()
        console.print(table_of({"rank": row["rank"], "stages": of} | row for of, row in zip(stages, peaks)))
        console.print(table_of(rank_table(run.timing, predicted)))
        console.print("  [dim]peak: of forward and backward; the optimizer's state, counted, comes on top.[/]\n")
    if joint is not None and (outcome := cap_outcome(run, joint)):
        console.print(f"  [{'green' if within_cap(run, joint) else 'bold red'}]{escape(outcome)}[/]\n")
    if run.gradients:
        console.print(table_of(moved_rows(run)))
    for note in run.notes:
        console.print(f"  [dim]{escape(note)}[/]")


PRINTERS = {PipelineRun: print_pipeline}
