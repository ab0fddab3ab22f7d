"""The verb `pipeline`: split a model, run its microbatches for real, and say whether the gradients still agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from explorer.cli.command import DIFFERENT, Output, answer_failure, print_json, say, verb
from explorer.cli.options import (
    KeepOptions,
    Model,
    ModelOptions,
    PolicyName,
    StaleOption,
    StepOptions,
    describe,
    policy_on,
)
from explorer.cli.pipeline_report import print_pipeline
from explorer.cli.results import spec_of_results
from explorer.cli.worker import ask, save_run_file, worker, write_file
from explorer.errors import InvalidPlan
from explorer.jobs.client import Worker
from explorer.jobs.protocol import OpenRanks, ProfileStages, RunPipeline
from explorer.plan.export.torchrun import SCRIPT_FILE, run_files, spec_beside, torchrun_command
from explorer.plan.pipeline.actions import format_rows, read_rows
from explorer.plan.pipeline.cuts import CutRule, atoms, check_stages, stages_by
from explorer.plan.pipeline.schedules import SCHEDULES, default_ranks, rows_of
from explorer.plan.policy import file as policy_file
from explorer.record.base import to_plain
from explorer.record.graph import ModelGraph
from explorer.record.pipeline_cost import PipelineProfile
from explorer.record.pipeline_plan import CheckpointMode, PipelineEngine, PipelinePlan
from explorer.record.pipeline_run import PipelineRun
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import RunSpec


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

    def changes(self) -> dict[str, Any]:
        """Fields of the plan that were asked for, but the stages. Raises InvalidPlan, UnreadableFile."""
        if self.rows is not None and self.schedule is not None:
            raise InvalidPlan(
                f"--schedule {self.schedule} and --rows {self.rows} both say who does what.", hint="Give one of them."
            )
        own = None if self.rows is None else format_rows(read_rows(self.rows))
        asked = {
            "n_microbatches": self.microbatches,
            "schedule": self.schedule,
            "n_ranks": self.ranks,
            "checkpoint": self.checkpoint,
            "keyed_rng": False if self.unkeyed else None,
            "deferred_batch_norm": True if self.deferred_batch_norm else None,
            "actions": () if self.schedule is not None else own,
        }
        return {name: value for name, value in asked.items() if value is not None}


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
    context: typer.Context,
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
    """Split into stages and run a schedule. Exit 1: splitting lost a gradient or moved one by more than rounding."""
    ref = options.ref(model)
    spec = step.spec(ref, KEEP_ALL, seed=options.seed)
    _refuse_accumulation(spec)
    with worker() as engine:
        if run.results is not None:
            pipeline_run = _opened(engine, run.results, (context, spec, split, policy), keep, stale)
            _answer(pipeline_run, keep, output)
            return
        graph = describe(engine, ref, options.seed, spec.device)
        chosen = policy_on(policy, graph, allow_stale=stale.allow_stale)
        profile = None
        if run.predict and run.engine != "torchrun":
            priced = msgspec.structs.replace(spec, policy=chosen)
            profile = ask(
                engine, ProfileStages(spec=priced, groups=atoms(graph), n_microbatches=split.microbatches or 4)
            )
        plan = plan_of(split, graph, chosen, profile, kept=_plan_in(policy))
        spec = msgspec.structs.replace(spec, policy=chosen, plan=plan)
        if run.out is not None:
            text = policy_file.dumps(chosen, model=ref, fingerprint=graph.fingerprint, plan=plan)
            write_file(run.out, text.encode())
            say(f"Wrote {run.out}.")
        if run.engine == "torchrun":
            _write_run(spec, run.folder, output)
            return
        pipeline_run = ask(engine, RunPipeline(spec=spec, engine=run.engine, profile=profile), keep=not keep.no_store)
    _answer(pipeline_run, keep, output)


def _refuse_accumulation(spec: RunSpec) -> None:
    if spec.n_accumulation > 1:
        raise InvalidPlan(
            f"--accumulate {spec.n_accumulation} is asked, and a pipeline accumulates over its microbatches already.",
            hint="Say how many with --microbatches.",
        )


def _opened(
    engine: Worker,
    results: Path,
    asked: tuple[typer.Context, RunSpec, PlanOptions, str],
    keep: KeepOptions,
    stale: StaleOption,
) -> PipelineRun:
    """What torchrun's ranks left, under the plan that they ran."""
    context, spec, split, policy = asked
    ran = spec_beside(results).plan
    assert ran is not None, "run_spec.json is written for a plan"
    changed = split.changes()
    if split.stages is not None:
        changed["stages"] = ((),) * split.stages
    typed_plan = msgspec.structs.replace(ran, **changed)

    def chosen() -> Policy:
        return policy_on(policy, describe(engine, spec.model, spec.seed, spec.device), allow_stale=stale.allow_stale)

    def typed(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    spec = spec_of_results(results, msgspec.structs.replace(spec, plan=typed_plan), chosen, typed)
    opened: PipelineRun = ask(engine, OpenRanks(spec=spec, folder=str(results.resolve())), keep=not keep.no_store)
    return opened


def plan_of(
    split: PlanOptions, graph: ModelGraph, policy: Policy, profile: PipelineProfile | None, *, kept: PipelinePlan | None
) -> PipelinePlan:
    """The plan of the options, over that of the policy file, if it has one. Raises InvalidPlan."""
    plan = msgspec.structs.replace(kept or PipelinePlan(stages=(), n_microbatches=4), **split.changes())
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


def _write_run(spec: RunSpec, folder: Path, output: Output) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in run_files(spec).items():
        write_file(folder / name, text.encode())
    (folder / SCRIPT_FILE).chmod(0o755)
    command = torchrun_command(spec, folder)
    if output.json:
        print_json({"command": command, "folder": str(folder)})
    else:
        typer.echo(command)
        say(f"Wrote {folder / SCRIPT_FILE}. Open what it leaves with --results {folder / 'results'}.")


def _answer(run: PipelineRun, keep: KeepOptions, output: Output) -> None:
    if keep.save is not None:
        save_run_file(run, keep.save)
    if output.json:
        print_json({**run.headlines(), **to_plain(run)})
    else:
        print_pipeline(run)
    if run.failure is not None:
        answer_failure(run.failure, replace(output, json=False))
    if run.moved:
        raise typer.Exit(DIFFERENT)
