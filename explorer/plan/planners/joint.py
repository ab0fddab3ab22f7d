"""Cuts, microbatches and policy of a pipeline, chosen together under a cap on the bytes of every rank.

Choosing cuts first and the policy second is worse: under an even cut the fullest rank recomputes most, and the step
waits for this rank. A joint choice gives fewer blocks to a rank that must recompute.

1. The recomputed blocks of a rank do not depend on other ranks: they are the cheapest choice below the cap. Blocks that
   free most bytes for their time are added until the rank fits. Then choices are tried in order of cost: the first that
   fits is the cheapest. At most MOST_TRIED are tried. A stage therefore has one time, which includes its recompute.
2. A dynamic program over these times finds the cut whose slowest stage is quickest. If there are few cuts, all are
   tried instead.
3. The clock simulates each resulting plan and the even cuts. Borders move by one until no move is quicker. So the
   result is never worse than an even cut.
4. A lower bound says how far the result may be from the best plan. A rank with stage j waits until the first microbatch
   has passed the blocks before the stage. Then it works on all m microbatches, and those blocks still have a backward:
   step >= kept blocks before j, once  +  m x (stage j with its necessary recompute).
5. The necessary recompute: with most microbatches in flight a rank holds parameters, receive buffers and saved bytes.
   Fractions of blocks remove the excess over the cap, best freed bytes per time first. No choice of whole blocks is
   cheaper. Both terms of the bound grow with every block of a stage, so a dynamic program finds the cut whose worst
   stage is least. If a rank holds several stages, or a backward is split in two, the bound is all work shared evenly.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, combinations, pairwise
from math import comb
from typing import NamedTuple, get_args

import msgspec

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.actions import stage_ranks
from explorer.plan.pipeline.clock import RankForecast, forecast, is_checkpointed, priced_backward
from explorer.plan.pipeline.cuts import CutRule, balance, n_in_flight, stages_by
from explorer.plan.pipeline.schedules import SCHEDULES, default_ranks, rows_of, sizes_of, unmet
from explorer.plan.pipeline.stage_costs import StagePosition, stage_cost, state_bytes
from explorer.plan.policy.counted import in_error
from explorer.plan.sizes import mib, mib_up
from explorer.record.graph import ModelGraph
from explorer.record.pipeline import ActionCost, PipelineProfile, StageCost
from explorer.record.plan import CapWish, JointPlan, Progress, Report, silent
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan

MOST_CUTS = 60
"""Number of cuts up to which all cuts are tried; a search handles more."""
MOST_MICROBATCHES = 64
MOST_TRIED = 32
"""Number of choices of five blocks."""
SECONDS = 10.0
"""Time for the whole search; the even cuts are always judged."""

Starts = tuple[int, ...]
"""First stretch of every stage."""
Stretch = tuple[int, int, int]
"""A stage, its first block, and the block after its last."""


class RankChoice(NamedTuple):
    """Numbers of the recomputed blocks, and the resulting costs of stages and bytes of ranks."""

    recomputed: frozenset[int]
    costs: tuple[StageCost, ...]
    rank_bytes: tuple[int, ...]
    """Bytes of every rank, the optimizer's state included."""


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
        self._of_rank = cache(self._cheapest)
        self._more_ms = [max(_whole_ms(block.recomputed) - _whole_ms(block.kept), 0.0) for block in profile.blocks]

    def under(self, borders: Sequence[int]) -> RankChoice:
        """The choices of all ranks for a cut. A rank that cannot keep the cap takes the choice nearest to the cap."""
        stretches = [(stage, first, end) for stage, (first, end) in enumerate(pairwise(borders))]
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

    def _cheapest(self, stretches: tuple[Stretch, ...]) -> RankChoice:
        if not stretches:  # a rank without a stage
            return RankChoice(frozenset(), (), (0,))
        cap = self.cap_bytes
        freed = [block.kept.saved_bytes - block.recomputed.saved_bytes for block in self.profile.blocks]
        offers = [k for _, first, end in stretches for k in range(first, end) if self.may_recompute[k]]
        by_value = sorted(offers, key=lambda k: self._more_ms[k] / freed[k])
        best = self.outcome(stretches, frozenset())
        for n in range(1, len(by_value) + 1):
            if best.rank_bytes[0] <= cap:
                break
            best = min(best, self.outcome(stretches, frozenset(by_value[:n])), key=_first_rank_bytes)
        few = 2 ** len(offers) <= MOST_TRIED
        if not best.recomputed or (best.rank_bytes[0] > cap and not few):
            return best
        for n_tried, chosen in enumerate(subsets_by_price(offers, self._more_ms)):
            if n_tried == MOST_TRIED or (best.rank_bytes[0] <= cap and chosen == best.recomputed):
                break
            choice = self.outcome(stretches, chosen)
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
    """Rule 4 for blocks first..end-1 as a stage; infinite if the blocks cannot fit."""
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
        """Rule 5, over all microbatches."""
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


class SimulatedPlan(NamedTuple):
    """A plan with its simulated step; plans with a lower `order` are better."""

    over_bytes: int
    """Bytes above the cap on the fullest rank; 0 if the plan fits."""
    makespan_ms: float
    rank_bytes: tuple[int, ...]
    starts: Starts
    plan: PipelinePlan
    policy: Policy

    @property
    def order(self) -> tuple[int, float]:
        return self.over_bytes, self.makespan_ms


def joint_plan(profile: PipelineProfile, graph: ModelGraph, wish: CapWish, report: Report = silent) -> JointPlan:
    """The quickest plan found whose ranks each hold at most the cap, optimizer included, with a bound of the step.

    Without a number in `wish` all numbers of microbatches are tried that divide the batch and suit the schedule.
    `report` receives each number. Raises InvalidPlan, with the least memory found, if no plan fits.
    """
    shape = wish.asked
    shape = msgspec.structs.replace(shape, n_ranks=shape.n_ranks or default_ranks(shape.schedule, len(shape.stages)))
    may_recompute = [
        block.recomputed.saved_bytes < block.kept.saved_bytes and not in_error(graph, [(fqn,) for fqn in block.blocks])
        for block in profile.blocks
    ]
    ends = time.monotonic() + SECONDS
    plans: list[SimulatedPlan] = []
    even_ms: list[float] = []
    bounds: list[float] = []
    counts = (wish.n_microbatches,) if wish.n_microbatches else microbatch_counts(profile, wish.asked)
    for n_done, n_microbatches in enumerate(counts):
        shape = msgspec.structs.replace(shape, n_microbatches=n_microbatches)
        choices = RankChoices(profile, shape, may_recompute, wish.cap_bytes)
        progress = Progress(what=f"plans with {n_microbatches} microbatches", done=n_done, total=len(counts))
        report(progress)
        bounds.append(least_step_ms(choices))
        search = _CutSearch(choices, ends, partial(report, progress))
        even = search.even_cuts(graph)
        even_ms += [plan.makespan_ms for plan in even if not plan.over_bytes]
        search.other_cuts()
        plans += search.plans.values()
    best = min(plans, key=lambda plan: plan.order, default=None)
    if best is None or best.over_bytes:
        raise _impossible(best, wish.cap_bytes)
    return JointPlan(
        plan=best.plan,
        policy=best.policy,
        cap_bytes=wish.cap_bytes,
        makespan_ms=best.makespan_ms,
        rank_bytes=best.rank_bytes,
        cuts_first_ms=min(even_ms, default=None),
        n_judged=len(plans),
        bound_ms=min(*bounds, best.makespan_ms),
    )


def lowered_cap(wish: CapWish, run_bytes: int) -> CapWish:
    """The wish after a run above the cap: the cap is lowered by the excess of the fullest rank."""
    return msgspec.structs.replace(wish, cap_bytes=2 * wish.cap_bytes - run_bytes)


def microbatch_counts(profile: PipelineProfile, shape: PipelinePlan) -> tuple[int, ...]:
    """All numbers of microbatches that divide the batch and suit the schedule. Raises InvalidPlan if there is none."""
    if shape.actions:
        return (shape.n_microbatches,)
    rows = profile.batch_rows
    divisors = [n for n in range(1, min(rows, MOST_MICROBATCHES) + 1) if rows % n == 0]
    fit = [n for n in divisors if not unmet(shape.schedule, sizes_of(msgspec.structs.replace(shape, n_microbatches=n)))]
    if not fit:
        raise InvalidPlan(
            f"No number of microbatches divides a batch of {rows} rows and suits {shape.schedule} with "
            f"{len(shape.stages)} stages.",
            hint="Take a larger batch, fewer stages, or the schedule GPipe.",
        )
    return tuple(fit)


class _CutSearch:
    """The search over cuts at one number of microbatches."""

    def __init__(self, choices: RankChoices, ends: float, before_simulation: Callable[[], None]) -> None:
        """The search stops at `ends` (monotonic seconds)."""
        self._choices, self._ends, self._before = choices, ends, before_simulation
        self._blocks, self._n_stages = choices.profile.blocks, len(choices.shape.stages)
        self.plans: dict[Starts, SimulatedPlan] = {}

    def even_cuts(self, graph: ModelGraph) -> list[SimulatedPlan]:
        """The cuts of equal parameters, time and memory. Raises InvalidPlan if there are too many stages."""
        choices, profile = self._choices, self._choices.profile
        first = {block.blocks[0]: k for k, block in enumerate(self._blocks)}
        pressure = (Policy.recompute([fqn for block in self._blocks for fqn in block.blocks]), choices.rows)
        cuts = [
            stages_by(rule, graph, self._n_stages, profile=profile, pressure=pressure) for rule in get_args(CutRule)
        ]
        return [self._simulated(tuple(first[stage[0]] for stage in stages)) for stages in cuts]

    def other_cuts(self) -> None:
        """All cuts if they are few; else the balanced cut, and the moves of borders from the best cut."""
        n, n_stages = len(self._blocks), self._n_stages
        if comb(n - 1, n_stages - 1) <= MOST_CUTS:
            for cuts in combinations(range(1, n), n_stages - 1):
                if time.monotonic() < self._ends:
                    self._simulated((0, *cuts))
            return
        if time.monotonic() < self._ends:
            starts = balance(n, n_stages, self._choices.stage_ms)
            if all(a < b for a, b in pairwise(starts)):  # else no cut fits at all
                self._simulated(starts)
        best = min(self.plans.values(), key=lambda plan: plan.order)
        while time.monotonic() < self._ends:
            moved = [self._simulated(starts) for starts in self._moves(best.starts)]
            best_moved = min(moved, key=lambda plan: plan.order, default=best)
            if best_moved.order >= best.order:
                return
            best = best_moved

    def _moves(self, starts: Starts) -> list[Starts]:
        """The cuts with one border moved by one block."""
        return [
            (*starts[:j], starts[j] + by, *starts[j + 1 :])
            for j in range(1, len(starts))
            for by in (-1, 1)
            if starts[j - 1] < starts[j] + by < (*starts, len(self._blocks))[j + 1]
        ]

    def _simulated(self, starts: Starts) -> SimulatedPlan:
        if starts not in self.plans:
            self._before()
            blocks, borders = self._blocks, (*starts, len(self._blocks))
            choice = self._choices.under(borders)
            stages = tuple(
                tuple(fqn for block in blocks[first:end] for fqn in block.blocks) for first, end in pairwise(borders)
            )
            plan = msgspec.structs.replace(self._choices.shape, stages=stages)
            self.plans[starts] = SimulatedPlan(
                over_bytes=max(0, max(choice.rank_bytes) - self._choices.cap_bytes),
                makespan_ms=forecast(plan, choice.costs).makespan_ms,
                rank_bytes=choice.rank_bytes,
                starts=starts,
                plan=plan,
                policy=Policy.recompute([fqn for k in sorted(choice.recomputed) for fqn in blocks[k].blocks]),
            )
        return self.plans[starts]


def _impossible(best: SimulatedPlan | None, cap_bytes: int) -> InvalidPlan:
    if best is None:
        return InvalidPlan("No plan could be made.", hint="Give numbers of microbatches that suit the schedule.")
    least = max(best.rank_bytes)
    return InvalidPlan(
        f"No plan was found that keeps every rank below {mib(cap_bytes)}: the least was {mib(least)}, on rank "
        f"{best.rank_bytes.index(least)} with {len(best.plan.stages)} stages and "
        f"{best.plan.n_microbatches} microbatches.",
        hint=f"Give a cap of {mib_up(least)} or more, more stages, or a smaller batch.",
    )
