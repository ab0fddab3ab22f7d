"""Cuts, microbatches and policy of a pipeline, chosen together under a cap on the bytes of every rank.

Choosing cuts first and the policy second is worse: under an even cut the fullest rank recomputes most, and the step
waits for this rank. A joint choice gives fewer blocks to a rank that must recompute.

1. The recomputed blocks of a rank do not depend on other ranks: they are the cheapest choice below the cap
   (rank_choice.py). A stage therefore has one time, which includes its recompute.
2. A dynamic program over these times finds the cut whose slowest stage is quickest. If there are few cuts, all are
   tried instead.
3. The clock simulates each resulting plan and the even cuts. Borders move by one until no move is quicker. So the
   result is never worse than an even cut.
4. A lower bound (rank_choice.py) says how far the result may be from the best plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from math import comb
from typing import NamedTuple, get_args

import msgspec

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.clock import forecast
from explorer.plan.pipeline.cuts import CutRule, balance, stages_by
from explorer.plan.pipeline.schedules import default_ranks, sizes_of, unmet
from explorer.plan.planners.rank_choice import RankChoices, least_step_ms
from explorer.plan.policy.counted import in_error
from explorer.plan.sizes import mib, mib_up
from explorer.record.graph import ModelGraph
from explorer.record.pipeline import BlockCost, PipelineProfile
from explorer.record.plan import CapWish, JointPlan, Progress, Report, silent
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan

MOST_CUTS = 60
"""Number of cuts up to which all cuts are tried; a search handles more."""
MOST_MICROBATCHES = 64
SECONDS = 10.0
"""Time for the whole search; the even cuts are always judged."""

Starts = tuple[int, ...]
"""First stretch of every stage."""


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
    may_recompute = [_may_recompute(graph, block) for block in profile.blocks]
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
            if all(a < b for a, b in zip(starts, starts[1:])):  # else no cut fits at all
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
                tuple(fqn for block in blocks[first:end] for fqn in block.blocks)
                for first, end in zip(borders, borders[1:])
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


def _may_recompute(graph: ModelGraph, block: BlockCost) -> bool:
    """True if the block may be recomputed and saves fewer bytes if recomputed."""
    if block.recomputed.saved_bytes >= block.kept.saved_bytes:
        return False
    return not in_error(graph, [(fqn,) for fqn in block.blocks])


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
