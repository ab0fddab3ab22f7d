"""Plans for the fullest of several ranks; whether FSDP2 frees gathered parameters after forward is chosen with them.

Without resharding a rank holds every gathered parameter until backward and gathers half as often. FLOPs and sent bytes
have no common price without a network. The plan of fewest FLOPs is therefore the cheapest, then the one that gathers
least; the other is shown beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from explorer.errors import BadInput
from explorer.plan.planners.planner import Planner
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.plan import Plan
from explorer.record.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOffer:
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
    planned = sorted((offer for offer in offers if offer.plan is not None), key=lambda offer: offer.price)
    return [*planned, *(offer for offer in offers if offer.plan is None)]
