"""Cuts, microbatches and policy of a pipeline, chosen together under a cap on what every rank holds.

Choosing cuts first and the policy second is worse: under an even cut the fullest rank recomputes most, and the step
waits for this rank. A joint choice gives fewer blocks to a rank that must recompute.

1. The recomputed blocks of a rank do not depend on other ranks: they are the cheapest choice below the cap
   (rank_choice.py). A stage therefore has one time, which includes its recompute.
2. A dynamic program over these times finds the cut whose slowest stage is quickest. If there are few cuts, all are
   tried instead.
3. The clock simulates each resulting plan and the even cuts. Borders move by one until no move is quicker. So the
   result is never worse than an even cut.
4. A lower bound (pipeline_bound.py) says how far the result may be from the best plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import combinations
from math import comb
from typing import NamedTuple, get_args

import msgspec

from explorer.errors import InvalidPlan
from explorer.plan.pipeline.clock import forecast
from explorer.plan.pipeline.cuts import CutRule, balance, stages_by
from explorer.plan.pipeline.schedules import default_ranks, rows_of, sizes_of, unmet
from explorer.plan.planners.pipeline_bound import least_step_ms
from explorer.plan.planners.rank_choice import RankChoices
from explorer.plan.policy.counted import in_error
from explorer.plan.sizes import mib, mib_up
from explorer.record.graph import ModelGraph
from explorer.record.pipeline_cost import BlockCost, PipelineProfile
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


class PlayedPlan(NamedTuple):
    """A plan with its simulated step; plans with a lower `order` are better."""

    over_bytes: int
    """Bytes above the cap on the fullest rank; 0 if the plan fits."""
    makespan_ms: float
    rank_bytes: tuple[int, ...]
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
    asked = wish.asked
    search = _Search(profile, graph, wish, report)
    counts = (wish.n_microbatches,) if wish.n_microbatches else microbatch_counts(profile, asked)
    for n_done, n_microbatches in enumerate(counts):
        search.now = Progress(what=f"plans with {n_microbatches} microbatches", done=n_done, total=len(counts))
        search.over_cuts(n_microbatches)
    best = search.best
    if best is None or best.over_bytes:
        raise _impossible(search, wish.cap_bytes)
    return JointPlan(
        plan=best.plan,
        policy=best.policy,
        cap_bytes=wish.cap_bytes,
        makespan_ms=best.makespan_ms,
        rank_bytes=best.rank_bytes,
        cuts_first_ms=search.cuts_first_ms,
        n_judged=len(search.judged),
        bound_ms=min(search.bound_ms, best.makespan_ms),
    )


def once_more(wish: CapWish, held_bytes: int) -> CapWish:
    """The wish after a run above the cap: the cap is lowered by the excess of the fullest rank."""
    return msgspec.structs.replace(wish, cap_bytes=2 * wish.cap_bytes - held_bytes)


def microbatch_counts(profile: PipelineProfile, asked: PipelinePlan) -> tuple[int, ...]:
    """All numbers of microbatches that divide the batch and suit the schedule. Raises InvalidPlan if there is none."""
    if asked.actions:
        return (asked.n_microbatches,)
    rows = profile.batch_rows
    divisors = [n for n in range(1, min(rows, MOST_MICROBATCHES) + 1) if rows % n == 0]
    fit = [n for n in divisors if not unmet(asked.schedule, sizes_of(msgspec.structs.replace(asked, n_microbatches=n)))]
    if not fit:
        raise InvalidPlan(
            f"No number of microbatches divides a batch of {rows} rows and suits {asked.schedule} with "
            f"{len(asked.stages)} stages.",
            hint="Take a larger batch, fewer stages, or the schedule GPipe.",
        )
    return tuple(fit)


class _Search:
    """The search over cuts: judged plans, the best plan, and the lower bound."""

    def __init__(self, profile: PipelineProfile, graph: ModelGraph, wish: CapWish, report: Report) -> None:
        self._profile, self._graph, self._cap = profile, graph, wish.cap_bytes
        self._report, asked = report, wish.asked
        self.now = Progress(what="", done=0, total=0)
        self._asked = msgspec.structs.replace(
            asked, n_ranks=asked.n_ranks or default_ranks(asked.schedule, len(asked.stages))
        )
        self._worth = [_is_worth(graph, block) for block in profile.blocks]
        self._ends = time.monotonic() + SECONDS
        self.judged: dict[tuple[int, Starts], PlayedPlan] = {}
        self.best: PlayedPlan | None = None
        self.cuts_first_ms: float | None = None
        self.bound_ms = float("inf")
        """Lower bound of the step over all numbers of microbatches so far."""

    def over_cuts(self, n_microbatches: int) -> None:
        """Judges the even cuts, and other cuts until time runs out."""
        n, n_stages = len(self._profile.blocks), len(self._asked.stages)
        shape = msgspec.structs.replace(self._asked, n_microbatches=n_microbatches)
        rows = rows_of(msgspec.structs.replace(shape, stages=((),) * n_stages))
        choices = RankChoices(self._profile, shape, rows, self._worth, self._cap)
        self._report(self.now)
        self.bound_ms = min(self.bound_ms, least_step_ms(self._profile, shape, rows, self._worth, self._cap))
        for starts in self._even(shape, choices):
            judged = self._judge(starts, choices)
            if not judged.over_bytes and (self.cuts_first_ms is None or judged.makespan_ms < self.cuts_first_ms):
                self.cuts_first_ms = judged.makespan_ms
        if comb(n - 1, n_stages - 1) <= MOST_CUTS:
            for cuts in combinations(range(1, n), n_stages - 1):
                if time.monotonic() < self._ends:
                    self._judge((0, *cuts), choices)
            return
        if time.monotonic() < self._ends:
            starts = balance(n, n_stages, choices.stage_ms)
            if all(a < b for a, b in zip(starts, starts[1:])):  # else no cut fits at all
                self._judge(starts, choices)
        tried = [one for (m, _), one in self.judged.items() if m == n_microbatches]
        self._move_borders(min(tried, key=lambda one: one.order), choices)

    def _even(self, shape: PipelinePlan, choices: RankChoices) -> Iterator[Starts]:
        first = {block.blocks[0]: k for k, block in enumerate(self._profile.blocks)}
        everything = Policy.recompute([fqn for block in self._profile.blocks for fqn in block.blocks])
        for rule in get_args(CutRule):
            stages = stages_by(
                rule, self._graph, len(shape.stages), profile=self._profile, pressure=(everything, choices.rows)
            )
            yield tuple(first[stage[0]] for stage in stages)

    def _move_borders(self, now: PlayedPlan, choices: RankChoices) -> None:
        """Moves one border by one block at a time, until no move is better."""
        while time.monotonic() < self._ends:
            starts = self._starts(now.plan)
            moved = [
                (*starts[:j], starts[j] + by, *starts[j + 1 :])
                for j in range(1, len(starts))
                for by in (-1, 1)
                if starts[j - 1] < starts[j] + by < (*starts, len(self._profile.blocks))[j + 1]
            ]
            best_moved = min((self._judge(one, choices) for one in moved), key=lambda one: one.order, default=now)
            if best_moved.order >= now.order:
                return
            now = best_moved

    def _starts(self, plan: PipelinePlan) -> Starts:
        first = {block.blocks[0]: k for k, block in enumerate(self._profile.blocks)}
        return tuple(first[stage[0]] for stage in plan.stages)

    def _judge(self, starts: Starts, choices: RankChoices) -> PlayedPlan:
        key = (choices.shape.n_microbatches, starts)
        if key not in self.judged:
            self._report(self.now)
            self.judged[key] = played = self._played(starts, choices)
            if self.best is None or played.order < self.best.order:
                self.best = played
        return self.judged[key]

    def _played(self, starts: Starts, choices: RankChoices) -> PlayedPlan:
        blocks = self._profile.blocks
        borders = (*starts, len(blocks))
        choice = choices.under(borders)
        stages = tuple(
            tuple(fqn for block in blocks[first:end] for fqn in block.blocks)
            for first, end in zip(borders, borders[1:])
        )
        plan = msgspec.structs.replace(choices.shape, stages=stages)
        policy = Policy.recompute([fqn for k in sorted(choice.recomputed) for fqn in blocks[k].blocks])
        played = forecast(plan, choice.costs)
        return PlayedPlan(
            over_bytes=max(0, max(choice.rank_bytes) - self._cap),
            makespan_ms=played.makespan_ms,
            rank_bytes=choice.rank_bytes,
            plan=plan,
            policy=policy,
        )


def _is_worth(graph: ModelGraph, block: BlockCost) -> bool:
    """True if the block may be recomputed and saves fewer bytes if recomputed."""
    if block.recomputed.saved_bytes >= block.kept.saved_bytes:
        return False
    return not in_error(graph, [(fqn,) for fqn in block.blocks])


def _impossible(search: _Search, cap_bytes: int) -> InvalidPlan:
    if search.best is None:
        return InvalidPlan("No plan could be made.", hint="Give numbers of microbatches that suit the schedule.")
    least = max(search.best.rank_bytes)
    return InvalidPlan(
        f"No plan was found that keeps every rank below {mib(cap_bytes)}: the least was {mib(least)}, on rank "
        f"{search.best.rank_bytes.index(least)} with {len(search.best.plan.stages)} stages and "
        f"{search.best.plan.n_microbatches} microbatches.",
        hint=f"Give a cap of {mib_up(least)} or more, more stages, or a smaller batch.",
    )
