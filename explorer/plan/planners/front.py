"""Plans as the page asks for them: the whole front, told plan by plan, or the one that a wish asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise

from explorer.errors import BadInput
from explorer.plan.card.cards import capacity_bytes
from explorer.plan.planners.confirm import confirmed, within_budget
from explorer.plan.planners.planner import Planner
from explorer.record.card import Card
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Front, Plan, Progress, Report, Wish
from explorer.record.policy import Policy

N_POINTS = 10
N_BETWEEN = 3
BETWEEN_SECONDS = 0.3
Play = Callable[[Policy], Measurement]


def find_plans(run: Measurement, graph: ModelGraph, wish: Wish, report: Report, play: Play | None = None) -> Front:
    """The plan of a wish, or the front. A budget that no plan meets is refused beside the plan of the least peak.

    `play` gives the step of `run` under another policy, predicted for the same card; a wish for a card needs it.
    Raises BadInput for other wishes that no plan fulfils, with what can be reached.
    """
    report(Progress(what="writing the step down as a program", done=0, total=0))
    planner = Planner(run, graph)
    planner.suggest(wish.suggested)
    if wish.card:
        if run.card is None or play is None:
            raise BadInput("The step is not predicted for a card.", hint="Choose a card among the options of the step.")
        return _for_card(planner, run.card.card, play, report)
    if wish.budget_bytes is not None:
        report(Progress(what="looking for the cheapest policy", done=0, total=0))
        try:
            return Front(plans=(planner.within(wish.budget_bytes),))
        except BadInput as error:
            return Front(plans=(planner.floor(),), refusal=f"{error.sentence} {error.hint}".strip())
    if wish.more_time is not None:
        report(Progress(what="looking for the least memory", done=0, total=0))
        return Front(plans=(planner.least_memory(wish.more_time),))
    plans: list[Plan] = []
    most = N_POINTS + 1 + len(list(planner.presets())) + N_BETWEEN
    for plan in chain(planner.front(N_POINTS), _at_presets(planner, plans), _between(planner, plans)):
        plans.append(plan)
        front = undominated(plans)
        report(Progress(what="finding plans", done=len(plans), total=most, plans=front))
    return Front(plans=undominated(plans))


def _for_card(planner: Planner, card: Card, play: Play, report: Report) -> Front:
    """The cheapest plan of whose step the card refuses nothing, with that step."""

    def say(what: str) -> None:
        report(Progress(what=what, done=0, total=0))

    say(f"looking for the cheapest policy on {card.name}")
    try:
        last = confirmed(planner, lambda planner: planner.within(capacity_bytes(card)), play, say)
    except BadInput as error:
        return Front(plans=(planner.floor(),), refusal=f"{error.sentence} {error.hint}".strip())
    plan, step = last.tries[-1]
    refusal = "" if within_budget(plan, step) else f"{card.name} refuses a request of every plan that was tried."
    return Front(plans=(plan,), refusal=refusal, step=step)


def undominated(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """`plans` without the plans that another plan beats in peak or cost and equals in the other.

    The plan without recompute stays, because the front begins with it.
    """
    best: set[Plan] = set()
    least_cost = math.inf
    for plan in sorted(plans, key=lambda plan: (plan.step_peak_bytes, plan.extra_cost)):
        if plan.extra_cost < least_cost:
            least_cost = plan.extra_cost
            best.add(plan)
    return tuple(plan for plan in plans if plan in best or not plan.policy.units)


def _at_presets(planner: Planner, plans: list[Plan]) -> Iterator[Plan]:
    """Plans with the peaks of those presets that would lie below the front."""
    for peak_bytes, cost in planner.presets():
        if not any(plan.step_peak_bytes <= peak_bytes and plan.extra_cost <= cost for plan in plans):
            yield planner.within(peak_bytes, seconds=BETWEEN_SECONDS)


def _between(planner: Planner, plans: list[Plan]) -> Iterator[Plan]:
    """Plans where the front has its largest steps, in bytes times cost."""
    refused: set[int] = set()
    for _ in range(N_BETWEEN):
        line = sorted(plans, key=lambda plan: plan.step_peak_bytes)
        steps = [(least, most) for least, most in pairwise(line) if _budget(least, most) not in refused]
        if not steps:
            return
        least, most = max(steps, key=lambda pair: (pair[1].step_peak_bytes - pair[0].step_peak_bytes) * _saved(*pair))
        plan = planner.within(_budget(least, most), seconds=BETWEEN_SECONDS)
        if plan.policy in (least.policy, most.policy):
            refused.add(_budget(least, most))
        else:
            yield plan


def _budget(least: Plan, most: Plan) -> int:
    return (least.step_peak_bytes + most.step_peak_bytes) // 2


def _saved(least: Plan, most: Plan) -> float:
    return max(0.0, least.extra_cost - most.extra_cost)
