"""A plan held against a run. A plan over its budget is made again for as much less, and once.

A segment that the model refuses is struck from the candidates, and the plan is made again without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from explorer.errors import BadInput, InvalidPolicy
from explorer.plan.names import Fqns
from explorer.plan.planners.budget import Planner
from explorer.plan.sizes import mib
from explorer.record.measurement import Measurement
from explorer.record.plan import Plan
from explorer.record.policy import Policy, Unit

MOST_PAIRS = 3
"""A refusal beyond so many strikes every segment of siblings of the refused blocks."""
MOST_REFUSALS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """Plans and their runs."""

    planner: Planner
    """Without the segments that the model refuses."""
    tries: tuple[tuple[Plan, Measurement], ...]
    """Every try with its run, the one that counts last; `kept` says of each whether it kept its budget."""
    refused: tuple[Fqns, ...]
    """Neighbours that the model refuses as one segment."""


def confirmed(
    planner: Planner,
    solve: Callable[[Planner], Plan],
    run: Callable[[Policy], Measurement],
    say: Callable[[str], None] = lambda _: None,
) -> Confirmation:
    """The plan that `solve` gets from the planner, and what a run of it says.

    `run` raises InvalidPolicy with `neighbours` for a segment that the model refuses. `say` gets why a plan is made
    again. Raises what `solve` and `run` raise, and the last refusal where there are more than MOST_REFUSALS.
    """
    refused: list[Fqns] = []
    runs: dict[Policy, Measurement] = {}

    def run_once(policy: Policy) -> Measurement:
        if policy not in runs:
            runs[policy] = run(policy)
        return runs[policy]

    while True:
        try:
            tries = _tries(planner, solve(planner), run_once, say)
        except InvalidPolicy as error:
            if not error.neighbours or len(refused) == MOST_REFUSALS:
                raise
            refused.append(error.neighbours)
            say(f"The model refuses {' and '.join(error.neighbours)} as one segment: planned again without it.")
            planner = planner.without(_struck(planner, refused))
        else:
            return Confirmation(planner=planner, tries=tuple(tries), refused=tuple(refused))


def kept(plan: Plan, run: Measurement) -> bool:
    """True if the run of a plan was within its budget, or complete for a plan without a budget."""
    if plan.budget_bytes is None:
        return run.complete
    return run.step_peak_bytes is not None and run.step_peak_bytes <= plan.budget_bytes


def _tries(
    planner: Planner, first: Plan, run: Callable[[Policy], Measurement], say: Callable[[str], None]
) -> list[tuple[Plan, Measurement]]:
    tries = [(first, run(first.policy))]
    budget = first.budget_bytes
    if budget is not None and not kept(*tries[0]):
        again = _with_less(planner, budget, tries[0][1].held_peak_bytes or 0)
        if again.policy != first.policy:
            say(f"The run was over the budget of {mib(budget)}: planned once more with as much less.")
            tries.append((again, run(again.policy)))
    return tries


def _with_less(planner: Planner, budget_bytes: int, held_bytes: int) -> Plan:
    """The plan for the budget minus the excess of the run; the floor if no plan goes so low."""
    try:
        plan = planner.within(budget_bytes - max(held_bytes - budget_bytes, 0))
    except BadInput:
        plan = planner.floor()
    return msgspec.structs.replace(plan, budget_bytes=budget_bytes)


def _struck(planner: Planner, refused: Sequence[Fqns]) -> list[Unit]:
    """Candidates with the neighbours of the last refusal; after many refusals, all segments of the same parent."""
    last, parent = set(refused[-1]), refused[-1][0].rpartition(".")[0]
    segments = [one.unit for one in planner.candidates.units if len(one.unit.blocks) > 1]
    if len(refused) <= MOST_PAIRS:
        return [unit for unit in segments if last <= set(unit.blocks)]
    return [unit for unit in segments if unit.blocks[0].rpartition(".")[0] == parent]
