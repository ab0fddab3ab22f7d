"""The split of a pipeline from command-line options, over the plan of a policy file or of a run that is opened.

`PlanOptions` and `plan_of` make the plan of a new run. `spec_of_results` reads the spec beside the files of ranks and
refuses options that contradict it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from explorer.cli.options import bounded
from explorer.errors import InvalidPlan
from explorer.plan.export.torchrun import spec_beside
from explorer.plan.pipeline.actions import format_rows, read_rows
from explorer.plan.pipeline.cuts import CutRule, check_stages, stages_by, usual_rule
from explorer.plan.pipeline.schedules import (
    SCHEDULES,
    USUAL_MICROBATCHES,
    USUAL_SCHEDULE,
    default_ranks,
    fitting,
    rows_of,
)
from explorer.plan.sizes import parse_bytes
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.pipeline_cost import PipelineProfile
from explorer.record.policy import Policy
from explorer.record.run import CheckpointMode, PipelinePlan, RunSpec


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of the split and its schedule."""

    stages: Annotated[int | None, typer.Option(min=1, help="Number of stages; the policy file's plan if left out.")] = (
        None
    )
    microbatches: Annotated[int | None, bounded(PipelinePlan, "n_microbatches", help="Microbatches of the batch.")] = (
        None
    )
    schedule: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(SCHEDULES)}; {USUAL_SCHEDULE} if left out.")
    ] = None
    ranks: Annotated[
        int | None, bounded(PipelinePlan, "n_ranks", help="Ranks; by default one a stage, or one for two stages.")
    ] = None
    cuts: Annotated[
        CutRule | None,
        typer.Option(help="How stages are balanced; by time where blocks are priced."),
    ] = None
    checkpoint: Annotated[CheckpointMode | None, typer.Option(help="Which microbatches are checkpointed.")] = None
    rows: Annotated[Path | None, typer.Option(metavar="CSV", help="An own schedule: one line of actions a rank.")] = (
        None
    )
    unkeyed: Annotated[bool, typer.Option("--unkeyed", help="Ordinary dropout, which depends on the split.")] = False
    deferred_batch_norm: Annotated[
        bool, typer.Option("--deferred-batch-norm", help="Running statistics move once per batch.")
    ] = False
    plan: Annotated[
        bool, typer.Option("--plan", help="Choose cuts, microbatches and policy together, below --cap on every rank.")
    ] = False
    cap: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What each rank may hold, optimizer included, such as 200MiB.")
    ] = None

    def cap_bytes(self, policy: str) -> int | None:
        """None: nothing is to be planned. Raises InvalidPlan for half a question."""
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
        return parse_bytes(self.cap)

    def changes(self) -> dict[str, Any]:
        """Requested fields of the plan, without the stages. Raises InvalidPlan, UnreadableFile."""
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


def plan_of(
    split: PlanOptions, graph: ModelGraph, policy: Policy, profile: PipelineProfile | None, *, kept: PipelinePlan | None
) -> PipelinePlan:
    """The plan of the options, over that of the policy file, if it has one. Raises InvalidPlan."""
    usual = PipelinePlan(stages=(), n_microbatches=_usual_microbatches(split, graph), schedule=USUAL_SCHEDULE)
    plan = msgspec.structs.replace(kept or usual, **split.changes())
    if split.stages is not None or not plan.stages:
        rule = split.cuts or usual_rule(profile)
        plan = _cut(plan, split.stages or 2, rule, graph, (policy, profile))
    check_stages(graph, plan.stages)
    rows_of(plan)
    return plan


def _usual_microbatches(split: PlanOptions, graph: ModelGraph) -> int:
    """Default number of microbatches: the number of stages, if it divides the batch."""
    return fitting(max(USUAL_MICROBATCHES, split.stages or 2), graph)


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


OF_THE_SPEC = (
    "seed", "device", "dtype", "autocast", "optimizer", "mode", "n_accumulation", "frozen", "n_repeats", "n_threads",
    "time_limit_s",
)  # fmt: skip


Typed = Callable[[str], bool]
"""Whether an option was given on this command line."""


def spec_of_results(results: Path, asked: RunSpec, policy: Callable[[], Policy], typed: Typed) -> RunSpec:
    """The spec that ran, with the model and weights of the command line: a file never decides what is loaded.

    `policy` reads the requested policy.

    Raises UnreadableFile without a spec file, InvalidPlan if a typed option contradicts the spec.
    """
    ran = spec_beside(results)
    faults = [*_model_faults(asked.model, ran.model, typed), *_spec_faults(asked, ran, typed)]
    if ran.plan is not None and asked.plan is not None:
        faults += _plan_faults(asked.plan, ran.plan, typed)
    if typed("policy") and policy().units != ran.policy.units:
        faults.append("--policy recomputes other blocks")
    if faults:
        raise InvalidPlan(
            f"The run in {results} was another one: {'; '.join(faults)}.",
            hint="Leave these options out: the run's own plan lies beside its results.",
        )
    named = {"target": asked.model.target, "weights": asked.model.weights}
    return msgspec.structs.replace(ran, model=msgspec.structs.replace(ran.model, **named))


def _model_faults(asked: ModelRef, ran: ModelRef, typed: Typed) -> list[str]:
    faults = []
    if _file_and_factory(asked.target) != _file_and_factory(ran.target):
        faults.append(f"its model was {ran.target}, not {asked.target}")
    if Path(asked.weights).name != Path(ran.weights).name:
        faults.append(f"its weights were {ran.weights or 'those of the factory'}: name them with --weights")
    if typed("size") and asked.size != ran.size:
        faults.append(f"--size {asked.size} is not {ran.size}")
    if typed("arguments") and asked.arguments != ran.arguments:
        was = " ".join(f"{name}={value}" for name, value in ran.arguments.items()) or "nothing"
        faults.append(f"--set was {was}")
    return faults


def _file_and_factory(target: str) -> tuple[str, str]:
    path, _, factory = target.partition(".py:")
    return (Path(path).name.removesuffix(".py"), factory) if ".py" in target else (target, "")


def _spec_faults(asked: RunSpec, ran: RunSpec, typed: Typed) -> list[str]:
    pairs = ((name, getattr(asked, name), getattr(ran, name)) for name in OF_THE_SPEC if typed(name))
    faults = [f"{name} was {there}, not {here}" for name, here, there in pairs if here != there]
    if typed("memory_limit") and asked.memory_limit_bytes != ran.memory_limit_bytes:
        faults.append(f"memory_limit was {ran.memory_limit_bytes} bytes")
    return faults


def _plan_faults(asked: PipelinePlan, ran: PipelinePlan, typed: Typed) -> list[str]:
    """Faults of the plan. `asked` is the plan that ran, with the options applied."""
    faults = []
    if typed("stages") and len(asked.stages) != len(ran.stages):
        faults.append(f"it had {len(ran.stages)} stages, not {len(asked.stages)}")
    if typed("ranks") and asked.n_ranks != len(rows_of(ran)):
        faults.append(f"it had {len(rows_of(ran))} ranks, not {asked.n_ranks}")
    if typed("microbatches") and asked.n_microbatches != ran.n_microbatches:
        faults.append(f"it had {ran.n_microbatches} microbatches, not {asked.n_microbatches}")
    if typed("schedule") and (ran.actions or asked.schedule != ran.schedule):
        faults.append(f"its schedule was {ran.schedule_name}, not {asked.schedule}")
    if typed("rows") and asked.actions != ran.actions:
        faults.append(f"its schedule was {ran.schedule_name}, not that of --rows")
    for name in ("checkpoint", "keyed_rng", "deferred_batch_norm"):
        option = "unkeyed" if name == "keyed_rng" else name
        if typed(option) and getattr(asked, name) != getattr(ran, name):
            faults.append(f"{name} was {getattr(ran, name)}")
    return faults
