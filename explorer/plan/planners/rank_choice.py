"""The recomputed blocks of one rank: the cheapest choice of its blocks that stays below the cap.

First, blocks that free most bytes for their time are added until the rank fits. Then choices are tried in order of
cost: the first that fits is the cheapest. At most MOST_TRIED choices are tried.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from explorer.plan.pipeline.actions import Rows, stage_ranks
from explorer.plan.pipeline.clock import is_checkpointed
from explorer.plan.pipeline.rank_memory import RankForecast
from explorer.plan.pipeline.split_backward import priced_backward
from explorer.plan.pipeline.stage_costs import StagePlace, stage_cost, state_bytes
from explorer.record.pipeline_cost import BlockCost, PipelineProfile, StageCost
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan

MOST_TRIED = 32
"""Number of choices of five blocks."""

Stretch = tuple[int, int, int]
"""A stage, its first block, and the block after its last."""


class RankChoice(NamedTuple):
    """Numbers of the recomputed blocks, and the resulting costs of stages and bytes of ranks."""

    recomputed: frozenset[int]
    costs: tuple[StageCost, ...]
    rank_bytes: tuple[int, ...]
    """Bytes of every rank, the optimizer's state included."""


IDLE = RankChoice(frozenset(), (), (0,))
"""The choice of a rank without a stage."""


class RankChoices:
    """Choices for every rank of any cut at one number of microbatches, cached by the stretches of the rank."""

    def __init__(
        self, profile: PipelineProfile, shape: PipelinePlan, rows: Rows, worth: Sequence[bool], cap_bytes: int
    ) -> None:
        """`shape`: the plan without its stages; `worth`: which blocks may be recomputed."""
        self._profile, self._worth, self._cap = profile, worth, cap_bytes
        self.shape, self.rows = shape, rows
        self._home = stage_ranks(rows)
        n = shape.n_microbatches
        self._chosen = [is_checkpointed(shape.checkpoint, i, n) for i in range(n)]
        self._known: dict[tuple[Stretch, ...], RankChoice] = {}
        self._more_ms = [max(_ms(block, again=True) - _ms(block, again=False), 0.0) for block in profile.blocks]

    def under(self, borders: Sequence[int]) -> RankChoice:
        """The choices of all ranks for a cut. A rank that cannot keep the cap takes the choice nearest to the cap."""
        stretches = [(stage, first, end) for stage, (first, end) in enumerate(zip(borders, borders[1:]))]
        parts: list[RankChoice] = []
        for rank in range(len(self.rows)):
            parts.append(self._of_rank(tuple(one for one in stretches if self._home[one[0]] == rank)))
        by_stage = {cost.stage: cost for part in parts for cost in part.costs}
        return RankChoice(
            recomputed=frozenset().union(*(part.recomputed for part in parts)),
            costs=tuple(by_stage[stage] for stage in range(len(stretches))),
            rank_bytes=tuple(part.rank_bytes[0] for part in parts),
        )

    def stage_ms(self, stage: int, first: int, end: int) -> float:
        """Forward and backward of a microbatch through the blocks as one stage, recompute included; infinite if the
        blocks do not fit. For a rank with several stages the time has no recompute."""
        if end <= first or list(self._home.values()).count(self._home[stage]) > 1:
            return sum(_ms(block, again=False) for block in self._profile.blocks[first:end])
        choice = self._of_rank(((stage, first, end),))
        if choice.rank_bytes[0] > self._cap:
            return float("inf")
        cost = choice.costs[0].recomputed
        return cost.forward_ms + cost.backward_ms

    def _of_rank(self, stretches: tuple[Stretch, ...]) -> RankChoice:
        if stretches not in self._known:
            self._known[stretches] = self._cheapest(stretches) if stretches else IDLE
        return self._known[stretches]

    def _cheapest(self, stretches: tuple[Stretch, ...]) -> RankChoice:
        offered = [k for _, first, end in stretches for k in range(first, end) if self._worth[k]]
        by_value = sorted(offered, key=lambda k: self._more_ms[k] / self._freed(k))
        best = self._tried(stretches, frozenset())
        for n in range(1, len(by_value) + 1):
            if best.rank_bytes[0] <= self._cap:
                break
            best = min(best, self._tried(stretches, frozenset(by_value[:n])), key=lambda one: one.rank_bytes[0])
        few = 2 ** len(offered) <= MOST_TRIED
        if not best.recomputed or (best.rank_bytes[0] > self._cap and not few):
            return best
        for n_tried, chosen in enumerate(_cheapest_first(offered, self._more_ms)):
            if n_tried == MOST_TRIED or (best.rank_bytes[0] <= self._cap and chosen == best.recomputed):
                break
            one = self._tried(stretches, chosen)
            if one.rank_bytes[0] <= self._cap:
                return one
            best = min(best, one, key=lambda one: one.rank_bytes[0])
        return best

    def _freed(self, k: int) -> int:
        block = self._profile.blocks[k]
        return block.kept.saved_bytes - block.recomputed.saved_bytes

    def _tried(self, stretches: tuple[Stretch, ...], chosen: frozenset[int]) -> RankChoice:
        blocks = self._profile.blocks
        policy = Policy.recompute([fqn for k in sorted(chosen) for fqn in blocks[k].blocks])
        n_stages = len(self._home)
        costs = [StageCost(stage=j, kept=blocks[0].kept, recomputed=blocks[0].kept) for j in range(n_stages)]
        for stage, first, end in stretches:
            place = StagePlace(stage, n_stages, self.shape.n_microbatches, blocks[first - 1] if stage else None)
            costs[stage] = stage_cost(self._profile, place, blocks[first:end], policy)
        own = {stage: costs[stage] for stage, _, _ in stretches}
        priced = {j: (priced_backward(cost.kept), priced_backward(cost.recomputed)) for j, cost in own.items()}
        memory = RankForecast(self.shape, tuple(costs), self._home, lambda stage, i: priced[stage][self._chosen[i]])
        rank = self._home[stretches[0][0]]
        trained = sum(cost.gradient_bytes for cost in own.values())
        held = memory.peak_bytes(rank, self.rows[rank]) + state_bytes(self._profile.spec, trained)
        return RankChoice(chosen, tuple(own.values()), (held,))


def _cheapest_first(offered: Sequence[int], price: Sequence[float]) -> Iterator[frozenset[int]]:
    """All subsets of `offered`, by ascending sum of prices."""
    order = sorted(offered, key=lambda k: price[k])
    yield frozenset()
    heap: list[tuple[float, tuple[int, ...]]] = [(price[order[0]], (0,))] if order else []
    while heap:
        total, places = heapq.heappop(heap)
        yield frozenset(order[place] for place in places)
        last = places[-1]
        if last + 1 < len(order):
            following = price[order[last + 1]]
            heapq.heappush(heap, (total + following, (*places, last + 1)))
            heapq.heappush(heap, (total + following - price[order[last]], (*places[:-1], last + 1)))


def _ms(block: BlockCost, *, again: bool) -> float:
    cost = block.recomputed if again else block.kept
    return cost.forward_ms + cost.backward_ms
