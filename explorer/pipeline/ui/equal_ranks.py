"""Every schedule on the same ranks, so that the choice of a schedule is all that differs."""

from __future__ import annotations

from msgspec.structs import replace

from explorer.errors import InvalidPlan
from explorer.pipeline.plan.cuts import stages_by, usual_rule
from explorer.pipeline.plan.schedules import SCHEDULES, splits_backward
from explorer.pipeline.plan.stage_costs import predict
from explorer.pipeline.record.step import PipelineProfile
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan
from explorer.view.drawing.units import mib, percent

NOT_PREDICTED = "not predicted, press Run"


def stages_for(schedule: str, n_ranks: int) -> int:
    """The fewest stages that the schedule can run on `n_ranks`."""
    row = SCHEDULES.get(schedule)
    return n_ranks if row is not None and row.shape == "single" else 2 * n_ranks


def schedules_table(
    profile: PipelineProfile, graph: ModelGraph, plan: PipelinePlan, policy: Policy, n_ranks: int
) -> list[dict[str, object]]:
    """Stages, step time, idle share and fullest rank of each schedule on `n_ranks`, or why there is no forecast.

    Microbatches and the other choices are those of `plan`; each schedule cuts the model by the usual rule.
    """
    rows = []
    for name in SCHEDULES:
        n_stages = stages_for(name, n_ranks)
        cells = {"step": "", "idle": "", "fullest rank": ""}
        candidate = replace(plan, schedule=name, actions=(), n_ranks=n_ranks)
        origin = NOT_PREDICTED
        try:
            if not splits_backward(candidate):
                stages = stages_by(usual_rule(profile), graph, n_stages, profile=profile)
                played = predict(profile, replace(candidate, stages=stages), policy)
                fullest = max((memory.device_bytes or 0 for memory in played.memory), default=0)
                cells["step"] = f"{played.makespan_ms:.1f} ms"
                cells |= {"idle": percent(played.bubble_fraction), "fullest rank": mib(fullest)}
                origin = played.origin
        except InvalidPlan as error:
            origin = str(error)
        rows.append({"schedule": name, "stages": n_stages, **cells, "origin": origin})
    return rows
