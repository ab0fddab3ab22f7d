"""A plan held against a run: one that turns out over its budget is planned once more, with as much less."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from explorer.errors import BadInput
from explorer.plan.planners.budget import Planner
from explorer.record.measurement import Measurement
from explorer.record.plan import Plan
from explorer.record.policy import Policy


def confirmed(planner: Planner, first: Plan, run: Callable[[Policy], Measurement]) -> list[tuple[Plan, Measurement]]:
    """Every try with its run, the one that counts last; `kept` says of each whether it kept its budget."""
    tries = [(first, run(first.policy))]
    budget = first.budget_bytes
    if budget is not None and not kept(*tries[0]):
        again = _with_less(planner, budget, tries[0][1].held_peak_bytes or 0)
        if again.policy != first.policy:
            tries.append((again, run(again.policy)))
    return tries


def kept(plan: Plan, run: Measurement) -> bool:
    """Whether the run of a plan was within its budget. A plan without one has nothing to keep."""
    if plan.budget_bytes is None:
        return run.complete
    return run.step_peak_bytes is not None and run.step_peak_bytes <= plan.budget_bytes


def _with_less(planner: Planner, budget_bytes: int, held_bytes: int) -> Plan:
    """For a budget as much lower as the run was above it; the floor where nothing goes so low."""
    try:
        plan = planner.within(budget_bytes - max(held_bytes - budget_bytes, 0))
    except BadInput:
        plan = planner.floor()
    return msgspec.structs.replace(plan, budget_bytes=budget_bytes)
