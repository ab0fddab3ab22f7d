"""The verb `pipeline`: split a model, run its microbatches for real, and say whether the gradients still agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.markup import escape

from explorer.cli.command import DIFFERENT, Output, answer_failure, print_json, say, verb
from explorer.cli.options import (
    KeepOptions,
    Model,
    ModelOptions,
    PolicyName,
    StepOptions,
    describe,
    file_on,
)
from explorer.cli.pipeline_options import PlanOptions, plan_of, spec_of_results
from explorer.cli.report import print_pipeline
from explorer.cli.worker import ask, check_writable, make_folder, print_or_write, save_run_file, worker, write_file
from explorer.errors import InvalidPlan
from explorer.jobs.client import Worker
from explorer.jobs.protocol import FindJointPlan, OpenRanks, ProfileStages, RunPipeline
from explorer.plan.export.torchrun import RESULTS, SCRIPT_FILE, run_files, spec_beside, torchrun_command
from explorer.plan.pipeline.cuts import atoms, split_at_borders
from explorer.plan.pipeline.schedules import USUAL_MICROBATCHES, USUAL_SCHEDULE
from explorer.plan.planners.joint import once_more
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.presets import is_preset
from explorer.record.base import to_plain
from explorer.record.graph import ModelGraph
from explorer.record.pipeline_cost import PipelineProfile
from explorer.record.pipeline_run import PipelineRun, fullest_bytes
from explorer.record.plan import CapWish, JointPlan
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.run import PipelineEngine, PipelinePlan, RunSpec
from explorer.view.drawing.units import mib
from explorer.view.text.pipeline import cap_kept, planned


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine that runs the plan, and the files to write."""

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
    keep: KeepOptions,
    output: Output,
    policy: PolicyName = "keep-all",
) -> None:
    """Split into stages and run a schedule. Exit 1: splitting lost a gradient or moved one by more than rounding, or a
    rank held more than --cap."""
    ref = options.ref(model)
    spec = step.spec(ref, KEEP_ALL, seed=options.seed)
    _refuse_accumulation(spec)
    cap = split.cap_bytes(policy)
    check_writable(keep.save, run.out)
    with worker() as engine:
        if run.results is not None:
            _answer(_opened(engine, run.results, (context, spec, split, policy), keep), keep, output)
            return
        graph = describe(engine, ref, options.seed, spec.device)
        file = file_on(policy, graph)
        spec = msgspec.structs.replace(spec, policy=file.policy)
        profile = None
        if cap is not None or (run.predict and run.engine != "torchrun"):
            parts = split.microbatches or USUAL_MICROBATCHES
            profile = ask(engine, ProfileStages(spec=spec, groups=atoms(graph), n_microbatches=parts))
        wish = None if cap is None else _wish(split, cap)
        joint = None if wish is None else _planned(engine, graph, profile, wish)
        plan = joint.plan if joint else plan_of(split, graph, spec.policy, profile, kept=file.pipeline)
        chosen = split_at_borders(spec.policy, plan.stages) if is_preset(policy) else spec.policy
        spec = msgspec.structs.replace(spec, policy=joint.policy if joint else chosen, plan=plan)
        if run.engine == "torchrun":
            _write_plan(run.out, spec, graph)
            _write_run(spec, run.folder, output)
            return
        request = RunPipeline(spec=spec, engine=run.engine, profile=profile)
        pipeline_run = ask(engine, request, keep=not keep.no_store)
        held = fullest_bytes(pipeline_run.memory)
        if wish is not None and held is not None and held > wish.cap_bytes:
            joint = _planned_once_more(engine, graph, profile, wish, held)
            spec = msgspec.structs.replace(spec, policy=joint.policy, plan=joint.plan)
            pipeline_run = ask(engine, msgspec.structs.replace(request, spec=spec), keep=not keep.no_store)
        _write_plan(run.out, spec, graph)
    _answer(pipeline_run, keep, output, joint)


def _wish(split: PlanOptions, cap_bytes: int) -> CapWish:
    shape = PipelinePlan(stages=((),) * (split.stages or 2), n_microbatches=USUAL_MICROBATCHES, schedule=USUAL_SCHEDULE)
    asked = msgspec.structs.replace(shape, **split.changes())
    return CapWish(asked=asked, cap_bytes=cap_bytes, n_microbatches=split.microbatches)


def _planned(engine: Worker, graph: ModelGraph, profile: PipelineProfile | None, wish: CapWish) -> JointPlan:
    assert profile is not None, "a plan is made from measured stretches"
    joint: JointPlan = ask(engine, FindJointPlan(profile=profile, graph=graph, wish=wish))
    say(planned(joint))
    return joint


def _planned_once_more(
    engine: Worker, graph: ModelGraph, profile: PipelineProfile | None, wish: CapWish, held: int
) -> JointPlan:
    """A second plan after a run whose fullest rank held `held` bytes, more than the cap."""
    say(f"A rank held {mib(held)} of {mib(wish.cap_bytes)}: planning once more with as much less.")
    joint = _planned(engine, graph, profile, once_more(wish, held))
    return msgspec.structs.replace(joint, cap_bytes=wish.cap_bytes)


def _write_plan(out: Path | None, spec: RunSpec, graph: ModelGraph) -> None:
    if out is not None:
        print_or_write(policy_file.dumps(policy_file.file_of(spec.policy, graph, plan=spec.plan)), out)


def _refuse_accumulation(spec: RunSpec) -> None:
    if spec.n_accumulation > 1:
        raise InvalidPlan(
            f"--accumulate {spec.n_accumulation} is asked, and a pipeline accumulates over its microbatches already.",
            hint="Say how many with --microbatches.",
        )


def _opened(
    engine: Worker, results: Path, asked: tuple[typer.Context, RunSpec, PlanOptions, str], keep: KeepOptions
) -> PipelineRun:
    """The run that torchrun's ranks recorded, under the plan that the ranks ran."""
    context, spec, split, policy = asked
    ran = spec_beside(results).plan
    assert ran is not None, "run_spec.json is written for a plan"
    changed = split.changes()
    if split.stages is not None:
        changed["stages"] = ((),) * split.stages
    typed_plan = msgspec.structs.replace(ran, **changed)

    def chosen() -> Policy:
        return file_on(policy, describe(engine, spec.model, spec.seed, spec.device)).policy

    def typed(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    spec = spec_of_results(results, msgspec.structs.replace(spec, plan=typed_plan), chosen, typed)
    opened: PipelineRun = ask(engine, OpenRanks(spec=spec, folder=str(results.resolve())), keep=not keep.no_store)
    return opened


def _write_run(spec: RunSpec, folder: Path, output: Output) -> None:
    make_folder(folder)
    for name, text in run_files(spec).items():
        write_file(folder / name, text.encode())
    (folder / SCRIPT_FILE).chmod(0o755)
    command = torchrun_command(spec, folder)
    if output.json:
        print_json({"command": command, "folder": str(folder)})
    else:
        typer.echo(command)
        say(escape(f"Wrote {folder / SCRIPT_FILE}. Open what it leaves with --results {folder / RESULTS}."))


def _answer(run: PipelineRun, keep: KeepOptions, output: Output, joint: JointPlan | None = None) -> None:
    if keep.save is not None:
        save_run_file(run, keep.save)
    kept = None if joint is None else cap_kept(run, joint)
    if output.json:
        planned = {} if joint is None else {"joint_plan": to_plain(joint), "cap_kept": kept}
        print_json({**run.headlines(), **to_plain(run), **planned})
    else:
        print_pipeline(run, joint)
    if run.failure is not None:
        answer_failure(run.failure, replace(output, json=False))
    if run.moved or kept is False:
        raise typer.Exit(DIFFERENT)
