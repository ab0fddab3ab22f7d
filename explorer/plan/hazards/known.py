"""What can go wrong with a policy or a plan on a model, said before any run: `check`, and the badges of the graph."""

from __future__ import annotations

from explorer.plan.hazards.any_checkpoint import POLICY_RULES
from explorer.plan.hazards.case import Case
from explorer.plan.hazards.pipeline import PIPELINE_RULES
from explorer.plan.hazards.reentrant import REENTRANT_RULES
from explorer.record.graph import Hazard, ModelGraph
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan, RunSpec

_ORDER = ("error", "warning", "note")


def hazards(
    graph: ModelGraph, policy: Policy, plan: PipelinePlan | None = None, spec: RunSpec | None = None
) -> tuple[Hazard, ...]:
    """Every rule that fires, errors first; empty where nothing is known to go wrong.

    `plan` adds the traps of a pipeline (None takes the plan of `spec`), `spec` those of a device, a mode, autocast.
    """
    plan = plan if plan is not None or spec is None else spec.plan
    case = Case(graph, policy, plan, spec)
    rules = POLICY_RULES
    if policy.use_reentrant and policy.units:
        rules += REENTRANT_RULES
    if plan is not None:
        rules += PIPELINE_RULES
    fired = [hazard for rule in rules for hazard in rule(case)]
    return tuple(sorted(fired, key=lambda hazard: _ORDER.index(hazard.severity)))
