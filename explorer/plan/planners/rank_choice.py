"""The recomputed blocks of one rank below the cap, and a lower bound of the step of all plans below the cap.

The choice of a rank is the cheapest choice of its blocks that fits. First, blocks that free most bytes for their time
are added until the rank fits. Then choices are tried in order of cost: the first that fits is the cheapest. At most
MOST_TRIED choices are tried.

The bound uses the same prices:

(1) A rank with stage j waits until the first microbatch has passed the blocks before the stage. Then the rank works on
    all m microbatches. After its last backward the blocks before still have a backward:
    step >= kept blocks before j, once  +  m x (stage j with its necessary recompute).
(2) The necessary recompute: with most microbatches in flight a rank holds parameters, receive buffers and saved bytes.
    Fractions of blocks remove the excess over the cap, best freed bytes per time first. No choice of whole blocks is
    cheaper.
(3) Both terms grow with every block of a stage, so a dynamic program finds the cut whose worst stage is least.

If a rank holds several stages, or a backward is split in two, the bound is all work shared evenly by the ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from explorer.plan.pipeline.actions import stage_ranks
from explorer.plan.pipeline.clock import RankForecast, is_checkpointed, priced_backward
from explorer.plan.pipeline.cuts import balance, n_in_flight
from explorer.plan.pipeline.schedules import SCHEDULES, rows_of
from explorer.plan.pipeline.stage_costs import StagePosition, stage_cost, state_bytes
from explorer.record.pipeline import ActionCost, BlockCost, PipelineProfile, StageCost
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
        self, profile: PipelineProfile, shape: PipelinePlan, may_recompute: Sequence[bool], cap_bytes: int
    ) -> None:
        """`shape`: the plan, whose stages count by their number alone; `may_recompute`: by block of the profile."""
        self.profile, self.shape, self.may_recompute, self.cap_bytes = profile, shape, may_recompute, cap_bytes
        self.rows = rows_of(shape)
        self._home = stage_ranks(self.rows)
        n = shape.n_microbatches
        self._checkpointed = [is_checkpointed(shape.checkpoint, i, n) for i in range(n)]
        self._cache: dict[tuple[Stretch, ...], RankChoice] = {(): IDLE}
        self._more_ms = [max(_whole_ms(block.recomputed) - _whole_ms(block.kept), 0.0) for block in profile.blocks]

    def under(self, borders: Sequence[int]) -> RankChoice:
        """The choices of all ranks for a cut. A rank that cannot keep the cap takes the choice nearest to the cap."""
        stretches = [(stage, first, end) for stage, (first, end) in enumerate(zip(borders, borders[1:]))]
        ranks = [
            self._of_rank(tuple(stretch for stretch in stretches if self._home[stretch[0]] == rank))
            for rank in range(len(self.rows))
        ]
        by_stage = {cost.stage: cost for choice in ranks for cost in choice.costs}
        return RankChoice(
            recomputed=frozenset().union(*(choice.recomputed for choice in ranks)),
            costs=tuple(by_stage[stage] for stage in range(len(stretches))),
            rank_bytes=tuple(choice.rank_bytes[0] for choice in ranks),
        )

    def stage_ms(self, stage: int, first: int, end: int) -> float:
        """Forward and backward of a microbatch through the blocks as one stage, recompute included; infinite if the
        blocks do not fit. For a rank with several stages the time has no recompute."""
        if end <= first or list(self._home.values()).count(self._home[stage]) > 1:
            return sum(_whole_ms(block.kept) for block in self.profile.blocks[first:end])
        choice = self._of_rank(((stage, first, end),))
        return float("inf") if choice.rank_bytes[0] > self.cap_bytes else _whole_ms(choice.costs[0].recomputed)

    def _of_rank(self, stretches: tuple[Stretch, ...]) -> RankChoice:
        if stretches not in self._cache:
            self._cache[stretches] = self._cheapest(stretches)
        return self._cache[stretches]

    def _cheapest(self, stretches: tuple[Stretch, ...]) -> RankChoice:
        cap = self.cap_bytes
        offers = [k for _, first, end in stretches for k in range(first, end) if self.may_recompute[k]]
        by_value = sorted(offers, key=lambda k: self._more_ms[k] / _freed(self.profile.blocks[k]))
        best = self.outcome(stretches, frozenset())
        for n in range(1, len(by_value) + 1):
            if best.rank_bytes[0] <= cap:
                break
            best = min(best, self.outcome(stretches, frozenset(by_value[:n])), key=_first_rank_bytes)
        few = 2 ** len(offers) <= MOST_TRIED
        if not best.recomputed or (best.rank_bytes[0] > cap and not few):
            return best
        for n_tried, blocks in enumerate(subsets_by_price(offers, self._more_ms)):
            if n_tried == MOST_TRIED or (best.rank_bytes[0] <= cap and blocks == best.recomputed):
                break
            choice = self.outcome(stretches, blocks)
            if choice.rank_bytes[0] <= cap:
                return choice
            best = min(best, choice, key=_first_rank_bytes)
        return best

    def outcome(self, stretches: tuple[Stretch, ...], recomputed: frozenset[int]) -> RankChoice:
        """Costs and bytes of one rank with these stretches if it recomputes the blocks `recomputed`."""
        blocks, m = self.profile.blocks, self.shape.n_microbatches
        policy = Policy.recompute([fqn for k in sorted(recomputed) for fqn in blocks[k].blocks])
        n_stages = len(self._home)
        costs = [StageCost(stage=j, kept=blocks[0].kept, recomputed=blocks[0].kept) for j in range(n_stages)]
        for stage, first, end in stretches:
            position = StagePosition(stage, n_stages, m, blocks[first - 1] if stage else None)
            costs[stage] = stage_cost(self.profile, position, blocks[first:end], policy)
        by_stage = {stage: costs[stage] for stage, _, _ in stretches}
        priced = {j: (priced_backward(cost.kept), priced_backward(cost.recomputed)) for j, cost in by_stage.items()}
        memory = RankForecast(
            self.shape, tuple(costs), self._home, lambda stage, i: priced[stage][self._checkpointed[i]]
        )
        rank = self._home[stretches[0][0]]
        trained = sum(cost.gradient_bytes for cost in by_stage.values())
        n_bytes = memory.peak_bytes(rank, self.rows[rank]) + state_bytes(self.profile.spec, trained)
        return RankChoice(recomputed, tuple(by_stage.values()), (n_bytes,))


def subsets_by_price(offers: Sequence[int], price: Sequence[float]) -> Iterator[frozenset[int]]:
    """All subsets of `offers`, by ascending sum of prices."""
    order = sorted(offers, key=lambda k: price[k])
    yield frozenset()
    heap: list[tuple[float, tuple[int, ...]]] = [(price[order[0]], (0,))] if order else []
    while heap:
        total, subset = heapq.heappop(heap)
        yield frozenset(order[index] for index in subset)
        last = subset[-1]
        if last + 1 < len(order):
            following = price[order[last + 1]]
            heapq.heappush(heap, (total + following, (*subset, last + 1)))
            heapq.heappush(heap, (total + following - price[order[last]], (*subset[:-1], last + 1)))


def least_step_ms(choices: RankChoices) -> float:
    """Lower bound in ms of the step of plans of one shape whose ranks hold at most the cap; infinite if none does."""
    profile, shape = choices.profile, choices.shape
    schedule = SCHEDULES.get(shape.schedule)
    if shape.actions or schedule is None or schedule.shape != "single":
        m = shape.n_microbatches
        scale = profile.batch_rows / m / profile.n_rows
        least = sum(min(_least_ms(block.kept), _least_ms(block.recomputed)) for block in profile.blocks)
        return m * scale * least / len(choices.rows)
    n, weight_ms = len(profile.blocks), _stage_bound(choices)
    starts = balance(n, len(shape.stages), weight_ms)
    return max(weight_ms(j, a, b) for j, (a, b) in enumerate(zip(starts, (*starts[1:], n), strict=True)))


def _stage_bound(choices: RankChoices) -> Callable[[int, int, int], float]:
    """Rule 1 for blocks first..end-1 as a stage; infinite if the blocks cannot fit."""
    profile, shape = choices.profile, choices.shape
    blocks, m, n_stages = profile.blocks, shape.n_microbatches, len(shape.stages)
    scale = profile.batch_rows / m / profile.n_rows
    flying = n_in_flight(choices.rows)
    least = [min(_whole_ms(block.kept), _whole_ms(block.recomputed)) for block in blocks]
    before = [0.0, *accumulate(scale * ms for ms in least)]
    static = [0, *accumulate(block.parameter_bytes for block in blocks)]
    trained = [0, *accumulate(block.gradient_bytes for block in blocks)]
    saved = [0, *accumulate(round(scale * block.kept.saved_bytes) for block in blocks)]
    # The cut is not known, so the narrowest border counts.
    buffer = round(scale * min((block.output_bytes for block in blocks[:-1]), default=0))
    overhead_ms = profile.overhead.forward_ms + profile.overhead.backward_ms
    n_checkpointed = {"always": m, "except_last": m - 1, "never": 0}[shape.checkpoint]
    offers = [
        (n_checkpointed * scale * max(_whole_ms(block.recomputed) - least[k], 0.0), freed, k)
        for k, block in enumerate(blocks)
        if choices.may_recompute[k] and n_checkpointed
        if (freed := round(scale * block.kept.saved_bytes) - round(scale * block.recomputed.saved_bytes)) > 0
    ]
    offers.sort(key=lambda offer: offer[0] / offer[1])

    def recompute_ms(stage: int, first: int, end: int) -> float:
        """Rule 2, over all microbatches."""
        n_borders = (stage > 0) + (stage < n_stages - 1)
        fixed_bytes = static[end] - static[first] + n_borders * m * buffer
        fixed_bytes += state_bytes(profile.spec, trained[end] - trained[first])
        excess = fixed_bytes + flying[stage] * (saved[end] - saved[first]) - choices.cap_bytes
        total_ms = 0.0
        for ms, freed, k in offers:
            if excess <= 0:
                break
            if first <= k < end:
                total_ms += min(1.0, excess / (flying[stage] * freed)) * ms
                excess -= flying[stage] * freed
        return total_ms if excess <= 0 else float("inf")

    def weight_ms(stage: int, first: int, end: int) -> float:
        stage_ms = before[end] - before[first] + overhead_ms * (end > first)
        return before[first] + m * stage_ms + recompute_ms(stage, first, end)

    return weight_ms


def _freed(block: BlockCost) -> int:
    return block.kept.saved_bytes - block.recomputed.saved_bytes


def _first_rank_bytes(choice: RankChoice) -> int:
    return choice.rank_bytes[0]


def _whole_ms(cost: ActionCost) -> float:
    """Forward and undivided backward."""
    return cost.forward_ms + cost.backward_ms


def _least_ms(cost: ActionCost) -> float:
    """Forward and backward, undivided or split, whichever is quicker."""
    split = cost.split
    whole = cost.backward_ms
    return cost.forward_ms + (whole if split is None else min(whole, split.input_ms + split.weight_ms))
