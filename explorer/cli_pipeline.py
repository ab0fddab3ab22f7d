"""The verb `pipeline`: split a model, run its microbatches for real, and say whether the gradients still agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from explorer.cli_options import (
    KeepOptions,
    Model,
    ModelOptions,
    PolicyName,
    StaleOption,
    StepOptions,
    describe,
    policy_on,
)
from explorer.cli_verb import DIFFERENT, Output, answer_failure, print_json, say, verb
from explorer.cli_work import ask, save_run_file, worker, write_file
from explorer.jobs.client import Worker
from explorer.jobs.protocol import OpenRanks, ProfileStages, RunPipeline
from explorer.plan import policy_file
from explorer.plan.cuts import CutRule, atoms, check_stages, stages_by
from explorer.plan.export_pipeline import SCRIPT_FILE, run_files, torchrun_command
from explorer.plan.schedule_text import format_rows, from_csv
from explorer.plan.schedules import SCHEDULES, default_ranks, rows_of
from explorer.record.base import to_plain
from explorer.record.graph import ModelGraph
from explorer.record.pipeline import PipelineRun
from explorer.record.pipeline_cost import PipelineProfile
from explorer.record.plan import CheckpointMode, PipelineEngine, PipelinePlan
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import RunSpec
from explorer.view.units import mib


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How the model is split and driven."""

    stages: Annotated[int | None, typer.Option(min=1, help="Number of stages; the policy file's plan if left out.")] = (
        None
    )
    microbatches: Annotated[int | None, typer.Option(min=1, help="Microbatches of the batch.")] = None
    schedule: Annotated[str | None, typer.Option(help=f"One of {', '.join(SCHEDULES)}.")] = None
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks; by default one a stage, or one for two stages.")] = (
        None
    )
    cuts: Annotated[CutRule, typer.Option(help="How stages are balanced.")] = "by-parameters"
    checkpoint: Annotated[CheckpointMode | None, typer.Option(help="Which microbatches are checkpointed.")] = None
    rows: Annotated[Path | None, typer.Option(metavar="CSV", help="An own schedule: one line of actions a rank.")] = (
        None
    )
    unkeyed: Annotated[bool, typer.Option("--unkeyed", help="Ordinary dropout, which depends on the split.")] = False
    deferred_batch_norm: Annotated[
        bool, typer.Option("--deferred-batch-norm", help="Running statistics move once per batch.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What runs it, and what is written."""

    engine: Annotated[PipelineEngine, typer.Option(help="torchrun writes the run script instead of running.")] = (
        "inproc"
    )
    predict: Annotated[
        bool, typer.Option("--predict/--no-predict", help="Profile first, and show what was predicted.")
    ] = True
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Of the torchrun files.")] = Path("pipeline-run")
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Open what torchrun's ranks left there instead of running.")
    ] = None
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the policy file with the plan.", rich_help_panel="Output"),
    ] = None


@verb
def pipeline(
    model: Model,
    options: ModelOptions,
    step: StepOptions,
    split: PlanOptions,
    run: EngineOptions,
    stale: StaleOption,
    keep: KeepOptions,
    output: Output,
    policy: PolicyName = "keep-all",
) -> None:
    """Split into stages and run a schedule. Exit 1: splitting moved a gradient (summed tied weights aside)."""
    ref = options.ref(model)
    spec = step.spec(ref, KEEP_ALL, seed=options.seed)
    with worker() as engine:
        graph = describe(engine, ref, options.seed)
        chosen = policy_on(policy, graph, allow_stale=stale.allow_stale)
        profile = None
        if run.predict and run.engine != "torchrun" and run.results is None:
            profile = ask(engine, ProfileStages(spec=spec, groups=atoms(graph), n_microbatches=split.microbatches or 4))
        plan = plan_of(split, graph, chosen, profile, kept=_plan_in(policy))
        spec = msgspec.structs.replace(spec, policy=chosen, plan=plan)
        if run.out is not None:
            text = policy_file.dumps(chosen, model=ref, fingerprint=graph.fingerprint, plan=plan)
            write_file(run.out, text.encode())
            say(f"Wrote {run.out}.")
        if run.engine == "torchrun" and run.results is None:
            _write_run(spec, run.folder, output)
            return
        found = _ask(engine, spec, run, profile, keep)
    _answer(found, keep, output)


def plan_of(
    split: PlanOptions, graph: ModelGraph, policy: Policy, profile: PipelineProfile | None, *, kept: PipelinePlan | None
) -> PipelinePlan:
    """The plan of the options, over that of the policy file, if it has one. Raises InvalidPlan."""
    base = kept or PipelinePlan(stages=(), n_microbatches=4)
    changes = {
        "n_microbatches": split.microbatches,
        "schedule": split.schedule,
        "n_ranks": split.ranks,
        "checkpoint": split.checkpoint,
        "keyed_rng": False if split.unkeyed else None,
        "deferred_batch_norm": True if split.deferred_batch_norm else None,
        "actions": None if split.rows is None else format_rows(from_csv(split.rows.read_text())),
    }
    plan = msgspec.structs.replace(base, **{name: value for name, value in changes.items() if value is not None})
    if split.stages is not None or not plan.stages:
        plan = _cut(plan, split.stages or 2, split.cuts, graph, (policy, profile))
    check_stages(graph, plan.stages)
    rows_of(plan)
    return plan


def _cut(
    plan: PipelinePlan, n_stages: int, rule: CutRule, graph: ModelGraph, known: tuple[Policy, PipelineProfile | None]
) -> PipelinePlan:
    policy, profile = known
    pressure = None
    if rule == "by-memory":
        n_ranks = plan.n_ranks or default_ranks(plan.schedule, n_stages)
        empty = msgspec.structs.replace(plan, stages=((),) * n_stages, n_ranks=n_ranks)
        pressure = (policy, rows_of(empty))
    return msgspec.structs.replace(plan, stages=stages_by(rule, graph, n_stages, profile=profile, pressure=pressure))


def _plan_in(policy: str) -> PipelinePlan | None:
    return policy_file.load(policy).pipeline if Path(policy).is_file() else None


def _ask(
    engine: Worker, spec: RunSpec, run: EngineOptions, profile: PipelineProfile | None, keep: KeepOptions
) -> PipelineRun:
    if run.results is not None:
        request: OpenRanks | RunPipeline = OpenRanks(spec=spec, folder=str(run.results.resolve()))
    else:
        request = RunPipeline(spec=spec, engine=run.engine, profile=profile)
    found: PipelineRun = ask(engine, request, keep=not keep.no_store)
    return found


def _write_run(spec: RunSpec, folder: Path, output: Output) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in run_files(spec, folder).items():
        write_file(folder / name, text.encode())
    (folder / SCRIPT_FILE).chmod(0o755)
    command = torchrun_command(spec, folder)
    if output.json:
        print_json({"command": command, "folder": str(folder)})
    else:
        typer.echo(command)
        say(f"Wrote {folder / SCRIPT_FILE}. Open what it leaves with --results {folder / 'results'}.")


def _answer(found: PipelineRun, keep: KeepOptions, output: Output) -> None:
    if keep.save is not None:
        save_run_file(found, keep.save)
    if output.json:
        print_json({**found.headlines(), **to_plain(found)})
    else:
        print_pipeline(found)
    if found.failure is not None:
        answer_failure(found.failure, replace(output, json=False))
    tied = {shares.name for shares in found.gradients if len(shares.stages) > 1}
    if any(not shares.splitting.bitwise for shares in found.gradients if shares.name not in tied):
        raise typer.Exit(DIFFERENT)


def print_pipeline(run: PipelineRun) -> None:
    """To stdout."""
    console = Console(highlight=False)
    plan = run.spec.plan
    assert plan is not None
    shape = f"{len(plan.stages)} stages on {len(run.rows)} ranks, {plan.schedule}, {plan.n_microbatches} microbatches"
    where = f"[dim]{run.engine}, {run.environment.device_name}[/]"
    console.print(f"\n[bold]{run.spec.model.target}[/]  {shape}  {where}\n", soft_wrap=True)
    if run.composed is not None:
        said = f", predicted {run.predicted.makespan_ms:.1f} ms" if run.predicted else ""
        console.print(
            f"  step [bold]{run.composed.makespan_ms:.1f} ms[/] [dim]measured actions, composed{said}[/]   "
            f"bubble [bold]{run.composed.bubble_fraction:.1%}[/]"
        )
        console.print(_rank_table(run))
    if run.gradients:
        console.print(_truth_table(run))
    for note in run.notes:
        console.print(f"  [dim]{note}[/]", soft_wrap=True)


def _rank_table(run: PipelineRun) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1))
    for name in ("rank", "stages", "peak", "predicted", "at", "receive buffers", "bubble"):
        table.add_column(name, justify="left" if name in ("rank", "stages", "at") else "right")
    predicted = {memory.rank: memory.peak_bytes for memory in run.predicted.memory} if run.predicted else {}
    assert run.composed is not None
    bubbles = {use.rank: use.bubble_fraction for use in run.composed.ranks}
    for memory in run.memory:
        stages = ", ".join(str(stage.stage) for stage in run.stages if stage.rank == memory.rank)
        table.add_row(
            str(memory.rank),
            stages,
            mib(memory.peak_bytes),
            mib(predicted.get(memory.rank)),
            memory.peak_action,
            mib(memory.receive_bytes),
            f"{bubbles[memory.rank]:.1%}",
        )
    return table


def _truth_table(run: PipelineRun) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=(0, 1))
    table.add_column("gradients")
    table.add_column("bitwise equal", justify="right")
    table.add_column("largest relative distance", justify="right")
    shares: tuple[Literal["microbatching", "recompute", "splitting"], ...] = ("microbatching", "recompute", "splitting")
    for share in shares:
        diffs = [getattr(entry, share) for entry in run.gradients]
        worst = max((diff.relative_norm or 0.0 for diff in diffs), default=0.0)
        table.add_row(f"moved by {share}", f"{sum(d.bitwise for d in diffs)} of {len(diffs)}", f"{worst:.2g}")
    return table
