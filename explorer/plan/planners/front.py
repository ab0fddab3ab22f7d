"""Plans as the page asks for them: the whole front plan by plan, or one plan for a wish.

For the fullest of several ranks it is chosen too whether FSDP2 frees gathered parameters after forward. Without
resharding a rank holds every gathered parameter until backward and gathers half as often. FLOPs and sent bytes have no
common price without a network: the plan of fewest FLOPs is the cheapest, then the one that gathers least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise

from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.plan.card.cards import capacity_bytes
from explorer.plan.planners.confirm import confirmed, within_budget
from explorer.plan.planners.planner import Planner
from explorer.record.base import Record
from explorer.record.card import Card
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Front, Plan, Progress, Report, Wish
from explorer.record.policy import Policy
from explorer.record.run import Ranks

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
    if wish.budget_bytes is not None or wish.more_time is not None:
        aim = "least memory" if wish.budget_bytes is None else "cheapest policy"
        report(Progress(what=f"looking for the {aim}", done=0, total=0))
        try:
            return Front(plans=(planner.fulfil(wish),))
        except BadInput as error:
            return Front(plans=(planner.floor(),), refusal=f"{error.sentence} {error.hint}".strip())
    plans: list[Plan] = []
    most = N_POINTS + 1 + len(list(planner.presets())) + N_BETWEEN
    for plan in chain(planner.front(N_POINTS), _at_presets(planner, plans), _between(planner, plans)):
        plans.append(plan)
        front = undominated(plans)
        report(Progress(what="finding plans", done=len(plans), total=most, plans=front))
    return Front(plans=undominated(plans))


def _for_card(planner: Planner, card: Card, play: Play, report: Report) -> Front:
    """The cheapest plan whose step the card grants, and this step."""

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

    def budget(pair: tuple[Plan, Plan]) -> int:
        return (pair[0].step_peak_bytes + pair[1].step_peak_bytes) // 2

    def area(pair: tuple[Plan, Plan]) -> float:
        least, most = pair
        return (most.step_peak_bytes - least.step_peak_bytes) * max(0.0, least.extra_cost - most.extra_cost)

    for _ in range(N_BETWEEN):
        steps = pairwise(sorted(plans, key=lambda plan: plan.step_peak_bytes))
        pair = max((pair for pair in steps if budget(pair) not in refused), key=area, default=None)
        if pair is None:
            return
        plan = planner.within(budget(pair), seconds=BETWEEN_SECONDS)
        if plan.policy in (pair[0].policy, pair[1].policy):
            refused.add(budget(pair))
        else:
            yield plan


class RankOffer(Record):
    """The plan for one split, before it is played."""

    first: Measurement
    """The fullest rank with everything kept."""
    planner: Planner
    plan: Plan | None
    refusal: BadInput | None = None
    """Why there is no plan."""

    @property
    def price(self) -> tuple[float, int]:
        """FLOPs that recompute adds (for a plan of least memory: its peak), and gathered bytes of a step."""
        assert self.plan is not None, "an offer with a plan"
        plan = self.plan
        return plan.step_peak_bytes if plan.budget_bytes is None else plan.extra_cost, self.first.gathered_bytes


def splits_of(ranks: Ranks, reshard: bool | None) -> tuple[Ranks, ...]:
    """The splits to choose from: with and without resharding for FSDP2 if `reshard` is None."""
    if ranks.data != "fsdp" or ranks.n_data == 1 or reshard is not None:
        return (ranks,)
    return replace(ranks, reshard=True), replace(ranks, reshard=False)


def offers_on_ranks(
    firsts: Sequence[Measurement], graph: ModelGraph, solve: Callable[[Planner], Plan]
) -> list[RankOffer]:
    """An offer for each split, the cheapest first and those without a plan last.

    `firsts` are the fullest rank of each split with everything kept; `solve` asks a planner for its plan.
    """
    offers = []
    for first in firsts:
        planner = Planner(first, graph)
        try:
            offers.append(RankOffer(first=first, planner=planner, plan=solve(planner)))
        except BadInput as refusal:
            offers.append(RankOffer(first=first, planner=planner, plan=None, refusal=refusal))
    return sorted(offers, key=lambda offer: (math.inf, 0) if offer.plan is None else offer.price)
