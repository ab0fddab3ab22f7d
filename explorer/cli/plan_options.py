"""How a model is split and driven, as the options of `pipeline` say it: they win over the plan of a policy file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from explorer.cli.options import bounded
from explorer.errors import InvalidPlan
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
from explorer.record.graph import ModelGraph
from explorer.record.pipeline_cost import PipelineProfile
from explorer.record.policy import Policy
from explorer.record.run import CheckpointMode, PipelinePlan


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How the model is split and driven."""

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
    """As many as there are stages, where they divide the batch."""
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
