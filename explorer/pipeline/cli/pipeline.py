"""The verb `pipeline`: split a model, run its microbatches for real, and say whether the gradients still agree.

`PlanOptions` and `plan_of` make the plan of a new run. `spec_of_results` reads the spec beside the files of ranks and
refuses options that contradict it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec.structs import replace
from rich.markup import escape

from explorer.cli.command import DIFFERENT, Output, answer_console, print_json, say, table_of, verb
from explorer.cli.options import KeepOptions, Model, PolicyName, PolicyOut, StepOptions, bounded, describe, file_on
from explorer.cli.worker import ask, check_writable, finish, make_folder, print_or_write, worker
from explorer.errors import InvalidPlan
from explorer.jobs.client import Worker
from explorer.jobs.run_file import write_file
from explorer.pipeline.cli.report import print_pipeline
from explorer.pipeline.jobs import FindJointPlan, OpenRanks, ProfileStages, RunPipeline
from explorer.pipeline.plan.cuts import CutRule, atoms, check_stages, split_at_borders, stages_by, usual_rule
from explorer.pipeline.plan.export import RESULTS, SCRIPT_FILE, run_files, spec_beside, torchrun_command
from explorer.pipeline.plan.schedules import SCHEDULES, USUAL, default_ranks, fitting, rows_of
from explorer.pipeline.plan.stage_costs import predict
from explorer.pipeline.record.step import CapWish, JointPlan, PipelineProfile, PipelineRun
from explorer.pipeline.view.results import memory_chart
from explorer.pipeline.view.text import plan_sentence, within_cap
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.presets import is_preset
from explorer.plan.sizes import parse_bytes
from explorer.record.base import to_plain
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.policy import Policy
from explorer.record.run import CheckpointMode, PipelinePlan, RunSpec
from explorer.view.drawing.units import count, mib


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of the split and its schedule."""

    stages: Annotated[int | None, typer.Option(min=1, help="Stages; those of the policy file if left out.")] = None
    microbatches: Annotated[int | None, bounded(PipelinePlan, "n_microbatches", help="Parts of the batch.")] = None
    schedule: Annotated[str | None, typer.Option(help=f"{', '.join(SCHEDULES)}; else {USUAL.schedule}.")] = None
    ranks: Annotated[int | None, bounded(PipelinePlan, "n_ranks", help="Ranks, each with stages of its own.")] = None
    cuts: Annotated[CutRule | None, typer.Option(help="How stages are balanced; by time if blocks are priced.")] = None
    checkpoint: Annotated[CheckpointMode | None, typer.Option(help="Which microbatches are checkpointed.")] = None
    unkeyed: Annotated[bool, typer.Option("--unkeyed", help="Ordinary dropout, which depends on the split.")] = False
    deferred_batch_norm: Annotated[
        bool, typer.Option("--deferred-batch-norm", help="Running statistics move once per batch.")
    ] = False
    plan: Annotated[bool, typer.Option("--plan", help="Choose cuts, microbatches and policy below --cap.")] = False
    cap: Annotated[str | None, typer.Option(metavar="SIZE", help="What each rank may hold, such as 200MiB.")] = None

    def wish(self, policy: str) -> CapWish | None:
        """What to plan below --cap; None: nothing is to be planned. Raises InvalidPlan for half a question."""
        if self.plan != (self.cap is not None):
            raise InvalidPlan(
                "--plan and --cap belong together.", hint="Such as --plan --cap 200MiB: what each rank may hold."
            )
        if self.cap is None:
            return None
        if policy != "keep-all":
            raise InvalidPlan(
                f"--policy {policy} and --plan both say what is recomputed.", hint="Leave --policy out, or --plan."
            )
        shape = replace(USUAL, stages=((),) * (self.stages or 2), **self.changes())
        return CapWish(asked=shape, cap_bytes=parse_bytes(self.cap), n_microbatches=self.microbatches)

    def changes(self) -> dict[str, object]:
        """Requested fields of the plan, without the stages."""
        fields = {
            "n_microbatches": self.microbatches,
            "schedule": self.schedule,
            "n_ranks": self.ranks,
            "checkpoint": self.checkpoint,
            "keyed_rng": False if self.unkeyed else None,
            "deferred_batch_norm": True if self.deferred_batch_norm else None,
            "actions": None if self.schedule is None else (),
        }
        return {name: value for name, value in fields.items() if value is not None}


def plan_of(
    split: PlanOptions,
    graph: ModelGraph,
    policy: Policy,
    profile: PipelineProfile | None,
    *,
    default: PipelinePlan | None,
) -> PipelinePlan:
    """The plan of the options, over that of the policy file, if it has one. Raises InvalidPlan.

    By default there are as many microbatches as stages, if that number divides the batch.
    """
    n_stages = split.stages or 2
    usual = replace(USUAL, n_microbatches=fitting(max(USUAL.n_microbatches, n_stages), graph))
    plan = replace(default or usual, **split.changes())
    if split.stages is not None or not plan.stages:
        rule, pressure = split.cuts or usual_rule(profile), None
        if rule == "by-memory":
            n_ranks = plan.n_ranks or default_ranks(plan.schedule, n_stages)
            empty = replace(plan, stages=((),) * n_stages, n_ranks=n_ranks)
            pressure = (policy, rows_of(empty))
        stages = stages_by(rule, graph, n_stages, profile=profile, pressure=pressure)
        plan = replace(plan, stages=stages)
    check_stages(graph, plan.stages)
    rows_of(plan)
    return plan


BESIDE_RESULTS = {"model", "weights", "results", "save", "no_store", "json", "traceback"}
"""Parameters that may stand beside --results. All others say what to run, and the results say what ran."""


def spec_of_results(results: Path, named: ModelRef, typed: Sequence[str]) -> RunSpec:
    """The spec that ran, with the model and weights of the command line: a file never decides what is loaded.

    `typed`: options on the command line that say what to run. Raises UnreadableFile without a spec file, InvalidPlan
    for such an option and for another model.
    """
    ran = spec_beside(results)
    faults = [f"{', '.join(typed)} cannot change it"] if typed else []
    if _file_and_factory(named.target) != _file_and_factory(ran.model.target):
        faults.append(f"its model was {ran.model.target}, not {named.target}")
    if Path(named.weights).name != Path(ran.model.weights).name:
        faults.append(f"its weights were {ran.model.weights or 'those of the factory'}: name them with --weights")
    if faults:
        raise InvalidPlan(
            f"The run in {results} was another one: {'; '.join(faults)}.",
            hint="Leave these options out: the run's own plan lies beside its results.",
        )
    model = replace(ran.model, target=named.target, weights=named.weights)
    return replace(ran, model=model)


def _file_and_factory(target: str) -> tuple[str, str]:
    path, _, factory = target.partition(".py:")
    return (Path(path).name.removesuffix(".py"), factory) if ".py" in target else (target, "")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine that runs the plan, and the files to write."""

    engine: Annotated[
        Literal["inproc", "torchrun"], typer.Option(help="torchrun writes the run script instead of running.")
    ] = "inproc"
    predict: Annotated[bool, typer.Option("--predict/--no-predict", help="Profile first, to predict.")] = True
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Of the torchrun files.")] = Path("pipeline-run")
    results: Annotated[Path | None, typer.Option(metavar="DIR", help="Open what torchrun's ranks left there.")] = None
    out: PolicyOut = None


@verb
def pipeline(
    context: typer.Context,
    model: Model,
    step: StepOptions,
    split: PlanOptions,
    run: EngineOptions,
    keep: KeepOptions,
    output: Output,
    policy: PolicyName = "keep-all",
) -> None:
    """Split into stages and run a schedule. Exit 1: splitting lost a gradient or moved one by more than rounding, or a
    rank held more than --cap."""
    spec = step.spec(model)
    if spec.n_accumulation > 1:
        raise InvalidPlan("A pipeline accumulates over its microbatches.", hint="Give --microbatches in its place.")
    wish = split.wish(policy)
    check_writable(keep.save, run.out)
    with worker() as engine:
        if run.results is not None:
            _answer(_opened(engine, run.results, context, spec.model, keep), keep, output)
            return
        graph = describe(engine, spec)
        file = file_on(policy, graph)
        spec = replace(spec, policy=file.policy)
        if wish is None:  # faults of the options are raised before blocks are priced
            plan_of(with_fields(split, cuts=None), graph, file.policy, None, default=file.pipeline)
        profile = None
        if wish is not None or (run.predict and run.engine != "torchrun"):
            parts = split.microbatches or USUAL.n_microbatches
            profile = ask(engine, ProfileStages(spec=spec, groups=atoms(graph), n_microbatches=parts))
        joint = None if wish is None else _planned(engine, graph, profile, wish)
        plan = joint.plan if joint else plan_of(split, graph, spec.policy, profile, default=file.pipeline)
        chosen = split_at_borders(spec.policy, plan.stages) if is_preset(policy) else spec.policy
        spec = replace(spec, policy=joint.policy if joint else chosen, plan=plan)
        if run.engine == "torchrun":
            _write_plan(run.out, spec, graph)
            _write_run(spec, run.folder, output)
            return
        request = RunPipeline(spec=spec, profile=profile)
        pipeline_run = ask(engine, request, keep=not keep.no_store)
        n_bytes = pipeline_run.fullest_bytes
        if wish is not None and n_bytes is not None and n_bytes > wish.cap_bytes:
            joint = _planned(engine, graph, profile, wish, held_bytes=n_bytes)
            spec = replace(spec, policy=joint.policy, plan=joint.plan)
            pipeline_run = ask(engine, replace(request, spec=spec), keep=not keep.no_store)
        _write_plan(run.out, spec, graph)
    _answer(pipeline_run, keep, output, joint, graph.batch)


def _planned(
    engine: Worker, graph: ModelGraph, profile: PipelineProfile | None, wish: CapWish, *, held_bytes: int = 0
) -> JointPlan:
    """The plan below the cap. `held_bytes`: held by the fullest rank in a run, if that was more than the cap."""
    assert profile is not None, "a plan is made from measured stretches"
    lower = wish
    if held_bytes:
        say(f"A rank held {mib(held_bytes)} of {mib(wish.cap_bytes)}: planning again, the cap lowered by the excess.")
        lower = replace(wish, cap_bytes=2 * wish.cap_bytes - held_bytes)
    joint: JointPlan = ask(engine, FindJointPlan(profile=profile, graph=graph, wish=lower))
    say(plan_sentence(joint))
    return replace(joint, cap_bytes=wish.cap_bytes)


def _write_plan(out: Path | None, spec: RunSpec, graph: ModelGraph) -> None:
    if out is not None:
        print_or_write(policy_file.dumps(policy_file.file_of(spec.policy, graph, plan=spec.plan)), out)


def _opened(engine: Worker, results: Path, context: typer.Context, named: ModelRef, keep: KeepOptions) -> PipelineRun:
    """The run that torchrun's ranks recorded, under the plan that the ranks ran."""
    others = [option for option in context.command.params if option.name not in BESIDE_RESULTS]
    sources = [context.get_parameter_source(str(option.name)) for option in others]
    typed = [option.opts[0] for option, source in zip(others, sources) if source and source.name == "COMMANDLINE"]
    spec = spec_of_results(results, named, typed)
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


def _answer(
    run: PipelineRun, keep: KeepOptions, output: Output, joint: JointPlan | None = None, batch: str = ""
) -> None:
    met = None if joint is None else within_cap(run, joint)
    if output.json:
        planned = {} if joint is None else {"joint_plan": to_plain(joint), "cap_kept": met}
        print_json({**run.headlines(), **to_plain(run), **planned, "batch": batch})
    else:
        print_pipeline(run, joint, batch=batch)
    finish(run, run.failure, keep.save, output)
    if run.moved or met is False:
        raise typer.Exit(DIFFERENT)


def answer_predicted(spec: RunSpec, policy: str, shape: tuple[int, int], output: Output) -> None:
    """The predicted peak of every rank of a pipeline; `shape`: stages, and copies of the pipeline."""
    n_stages, n_copies = shape
    with worker() as engine:
        graph = describe(engine, spec)
        spec = replace(spec, policy=file_on(policy, graph).policy)
        profile = ask(engine, ProfileStages(spec=spec, groups=atoms(graph), n_microbatches=USUAL.n_microbatches))
    plan = plan_of(PlanOptions(stages=n_stages, cuts="by-parameters"), graph, spec.policy, profile, default=None)
    memory = predict(profile, plan, split_at_borders(spec.policy, plan.stages)).memory
    if output.json:
        ranks = [{"rank": rank.rank, "peak_bytes": rank.device_bytes} for rank in memory]
        print_json({"plan": to_plain(plan), "n_copies": n_copies, "ranks": ranks})
    else:
        answer_console().print(table_of(memory_chart(memory).rows()))
        say(f"{count(n_copies, 'copy', 'copies')}; the optimizer's state comes on top of the peaks.")
