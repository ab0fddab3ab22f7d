"""Plans checked by runs. If a run exceeds the budget, the planner is asked again with the budget lowered by the excess:
once, and for a card up to four times.

A segment that the model refuses is struck from the candidates, and the plan is made again without it. `refusal` is
about a run that was cut short: why memory was refused, and what would have fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from explorer.errors import BadInput, InvalidPolicy
from explorer.plan.card.cards import capacity_bytes
from explorer.plan.card.step_on_card import excess_bytes
from explorer.plan.memory.ledger import holders, ledger
from explorer.plan.memory.next_step import next_step
from explorer.plan.memory.outside import outside_modules
from explorer.plan.names import Fqns, is_within, listed
from explorer.plan.planners.planner import Planner
from explorer.plan.sizes import mib
from explorer.record.allocations import Ledger
from explorer.record.base import Record
from explorer.record.measurement import Measurement
from explorer.record.plan import Plan
from explorer.record.policy import Policy, Unit

MOST_PAIRS = 3
"""A refusal beyond so many strikes every segment of siblings of the refused blocks."""
MOST_REFUSALS = 12
MOST_PLANS_FOR_A_CARD = 4
"""How often a plan is made again that a card refuses. Each costs one step without data."""


class Confirmation(Record):
    """Plans and their runs."""

    planner: Planner
    """Without the segments that the model refuses."""
    tries: tuple[tuple[Plan, Measurement], ...]
    """Every try with its run, the one that counts last; `within_budget` says of each whether it kept its budget."""
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


def within_budget(plan: Plan, run: Measurement) -> bool:
    """True if the run of a plan was within its budget, or complete for a plan without a budget."""
    return within_bytes(run, plan.budget_bytes)


def within_bytes(run: Measurement, budget_bytes: int | None) -> bool:
    """True if a run is complete and its peak is not above the budget.

    A run for a card is within its budget if the card refuses no request too.
    """
    if run.card is not None and run.card.refused is not None:
        return False
    if budget_bytes is None:
        return run.complete
    return run.step_peak_bytes is not None and run.step_peak_bytes <= budget_bytes


def _tries(
    planner: Planner, first: Plan, run: Callable[[Policy], Measurement], say: Callable[[str], None]
) -> list[tuple[Plan, Measurement]]:
    tries = [_bounded(first, run(first.policy))]
    budget = first.budget_bytes
    if budget is None:
        return tries
    most = MOST_PLANS_FOR_A_CARD if tries[0][1].card is not None else 1
    while len(tries) <= most and not within_budget(*tries[-1]):
        lower_budget = _lower_budget(budget, *tries[-1])
        try:
            again, error = planner.within(lower_budget), None
        except BadInput as no_plan:
            again, error = planner.floor(), no_plan
        is_new = again.policy not in [plan.policy for plan, _ in tries]
        if is_new:
            say(_over(budget, lower_budget, tries[-1][1]))
            tries.append(_bounded(replace(again, budget_bytes=budget), run(again.policy)))
        if error is not None and tries[-1][1].card is not None and not within_budget(*tries[-1]):
            raise _no_plan_for_card(*tries[-1], error)
        if error is not None or not is_new:
            break
    return tries


def _bounded(plan: Plan, run: Measurement) -> tuple[Plan, Measurement]:
    """The plan, which names the figure that the budget bounds, and its run."""
    for_card = run.card is not None and plan.budget_bytes is not None
    return replace(plan, bounded="reserved" if for_card else "requested"), run


def _lower_budget(budget_bytes: int, plan: Plan, run: Measurement) -> int:
    """Peak to plan for next: the budget minus the excess of the run.

    For a card, the last plan's peak minus the excess: what the allocator adds to the peak is taken to stay the same.
    """
    excess = max((run.held_peak_bytes or 0) - budget_bytes, 0)
    if run.card is None:
        return budget_bytes - excess
    return min(budget_bytes, plan.step_peak_bytes) - max(excess, excess_bytes(run))


def _over(budget_bytes: int, lower_budget: int, run: Measurement) -> str:
    if run.card is None:
        return f"The run was over the budget of {mib(budget_bytes)}: planned again with as much less."
    return (
        f"The plan would reserve {mib(excess_bytes(run))} more than {run.card.card.name} has: planned again for "
        f"{mib(lower_budget)} of requested memory."
    )


def _no_plan_for_card(floor: Plan, run: Measurement, error: BadInput) -> BadInput:
    assert run.card is not None
    card = run.card.card
    needed = capacity_bytes(card) + excess_bytes(run)
    return BadInput(
        f"No plan that was tried keeps this step within the {mib(capacity_bytes(card))} that can be reserved on "
        f"{card.name}: the lowest peak requests {mib(floor.step_peak_bytes)} and would reserve {mib(needed)}. "
        f"{error.sentence}",
        hint="Take a larger card or a smaller batch, or try expandable_segments:True of the allocator.",
    )


def _struck(planner: Planner, refused: Sequence[Fqns]) -> list[Unit]:
    """Candidates with the neighbours of the last refusal; after many refusals, all segments of the same parent."""
    last, parent = set(refused[-1]), refused[-1][0].rpartition(".")[0]
    segments = [unit for unit in planner.offered if len(unit.blocks) > 1]
    if len(refused) <= MOST_PAIRS:
        return [unit for unit in segments if last <= set(unit.blocks)]
    return [unit for unit in segments if unit.blocks[0].rpartition(".")[0] == parent]


def refusal(run: Measurement, whole: Measurement | None = None) -> tuple[str, ...]:
    """Sentences on the bytes held when `run` was refused, and a policy that fits; `whole` is an earlier full step."""
    if run.failure is None or run.allocations is None or not run.allocations.n_bytes:
        return ()
    at = ledger(run, max(run.allocations.born))  # right after the last granted allocation: a peak may lie before
    sentence = f"Held then: {mib(at.total_bytes)}, of it {holders(at)}. {outside_modules(at)}".strip()
    return (sentence, _fits(run, whole) if whole is not None else _could_go(run, at))


def _fits(run: Measurement, whole: Measurement) -> str:
    """A sentence on the cheapest policy that keeps the earlier step within the memory that was available."""
    assert run.failure is not None and run.allocations is not None
    # Both figures are from when the error arrived: the refused operator had freed its memory by then.
    there = run.allocations.held_bytes[-1] + (run.failure.free_bytes or 0)
    before = f"an earlier step held {mib(whole.step_peak_bytes or 0)}"
    later = mib(next_step(whole).step_peak_bytes or 0)
    if later != mib(whole.step_peak_bytes or 0):
        before += f", and {later} with the state that it made"
    if whole.graph is None:
        return f"There was room for {mib(there)}; {before}."
    try:
        plan = Planner(whole, whole.graph, seconds=1.0).within(there)
    except BadInput as error:
        return f"There was room for {mib(there)}; {before}. {error.sentence}"
    n_units = len(plan.policy.units)
    if not n_units:
        return f"There was room for {mib(there)}; {before}, which fits: this step is larger."
    return (
        f"There was room for {mib(there)}; {before}. With {listed(plan.policy.blocks)} recomputed it would have peaked "
        f"at {mib(plan.step_peak_bytes)} (predicted)."
    )


def _could_go(run: Measurement, at: Ledger) -> str:
    """A sentence on the bytes held `at` the refusal that recomputing could have freed, without a complete step."""
    repeats = run.graph.repeats if run.graph is not None else ()
    ran = [fqn for fqn in repeats if run.by_fqn.get(fqn) is not None and run.by_fqn[fqn].n_forward]
    saved = [cell for cell in at.cells if cell.role == "saved activation"]
    freed = sum(cell.n_bytes for cell in saved if is_within(cell.block, *ran))
    if not freed:
        return "Record a step that fits (a smaller batch, or every block recomputed): a plan needs a whole one."
    return (
        f"Saved activations of {listed(tuple(ran))} hold {mib(freed)} of it: recomputing them frees most of that. "
        "A plan needs a step that fits: record one with a smaller batch, or with these blocks recomputed."
    )
