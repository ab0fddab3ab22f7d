"""Cuts, microbatches and policy of a pipeline below a cap on the bytes of every rank: the quickest of some plans.

Loops over cut rules, microbatch counts and policies: the presets that recompute whole blocks, and the policies of
`_bisect`. The simulated clock judges every plan. Better plans may exist, so the result says how many were tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from msgspec.structs import replace

from explorer.errors import InvalidPlan
from explorer.pipeline.plan.actions import stage_ranks
from explorer.pipeline.plan.cuts import CutRule, left_out, split_at_borders, stages_by
from explorer.pipeline.plan.schedules import default_ranks, rows_of, sizes_of, unmet
from explorer.pipeline.plan.stage_costs import predict
from explorer.pipeline.record.step import BlockCost, CapWish, JointPlan, PipelineProfile
from explorer.plan.policy.counted import counted_units, in_error
from explorer.plan.policy.presets import preset
from explorer.plan.sizes import mib, mib_up
from explorer.record.graph import ModelGraph
from explorer.record.plan import Progress, Report, silent
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan

MOST_MICROBATCHES = 64
WHOLE_BLOCKS = ("all", "every-2", "sqrt", "except-last")
"""Presets to try. Their blocks have prices; operators that a preset keeps have none."""


def joint_plan(profile: PipelineProfile, graph: ModelGraph, wish: CapWish, report: Report = silent) -> JointPlan:
    """The quickest plan tried whose ranks each hold at most the cap, optimizer included. Raises InvalidPlan if none."""
    shape = wish.asked
    shape = replace(shape, n_ranks=shape.n_ranks or default_ranks(shape.schedule, len(shape.stages)))
    counts = (wish.n_microbatches,) if wish.n_microbatches else microbatch_counts(profile, shape)
    pricer = _Pricer(profile, graph, wish.cap_bytes)
    tried: list[JointPlan] = []
    for n_done, n in enumerate(counts):
        report(Progress(what=f"plans with {n} microbatches", done=n_done, total=len(counts)))
        tried += pricer.plans(replace(shape, n_microbatches=n))
    best = min(tried, key=lambda plan: (max(0, max(plan.rank_bytes) - wish.cap_bytes), plan.makespan_ms))
    least = max(best.rank_bytes)
    if least > wish.cap_bytes:
        raise InvalidPlan(
            f"No plan was found that keeps every rank below {mib(wish.cap_bytes)}: the least of {len(tried)} was "
            f"{mib(least)}, on rank {best.rank_bytes.index(least)} with {len(best.plan.stages)} stages and "
            f"{best.plan.n_microbatches} microbatches.",
            hint=f"Give a cap of {mib_up(least)} or more, more stages, or a smaller batch.",
        )
    return replace(best, n_judged=len(tried))


def microbatch_counts(profile: PipelineProfile, shape: PipelinePlan) -> list[int]:
    """All numbers of microbatches that divide the batch and suit the schedule. Raises InvalidPlan if there is none."""
    if shape.actions:
        return [shape.n_microbatches]
    rows = profile.batch_rows
    divisors = [n for n in range(1, min(rows, MOST_MICROBATCHES) + 1) if rows % n == 0]
    fit = [n for n in divisors if not unmet(shape.schedule, sizes_of(replace(shape, n_microbatches=n)))]
    if not fit:
        raise InvalidPlan(
            f"No number of microbatches divides a batch of {rows} rows and suits {shape.schedule} with "
            f"{len(shape.stages)} stages.",
            hint="Take a larger batch, fewer stages, or the schedule GPipe.",
        )
    return fit


class _Pricer:
    """Plans of one priced model and their simulated steps."""

    def __init__(self, profile: PipelineProfile, graph: ModelGraph, cap_bytes: int) -> None:
        self._profile, self._graph, self._cap_bytes = profile, graph, cap_bytes
        freeing = [block for block in profile.blocks if block.recomputed.saved_bytes < block.kept.saved_bytes]
        allowed = [block for block in freeing if not in_error(graph, [*zip(block.blocks)])]
        self._offers = sorted(allowed, key=_ms_per_freed_byte)
        self._presets = [preset(name, graph) for name in WHOLE_BLOCKS] if counted_units(graph) else []

    def plans(self, shape: PipelinePlan) -> Iterator[JointPlan]:
        """Plans for one number of microbatches."""
        rows = rows_of(shape)
        policies = [Policy(), *self._presets]
        cuts = {
            stages_by(rule, self._graph, len(shape.stages), profile=self._profile, pressure=(policy, rows))
            for rule in get_args(CutRule)
            for policy in policies
        }
        for stages in sorted(cuts):
            plan = replace(shape, stages=stages)
            at_borders = dict.fromkeys(split_at_borders(policy, stages) for policy in self._presets)
            yield from (self._simulated(plan, policy) for policy in at_borders if not left_out(plan, policy))
            yield from self._bisect(plan)

    def _simulated(self, plan: PipelinePlan, policy: Policy) -> JointPlan:
        played = predict(self._profile, plan, policy)
        return JointPlan(
            plan=plan,
            policy=policy,
            cap_bytes=self._cap_bytes,
            makespan_ms=played.makespan_ms,
            rank_bytes=tuple(memory.device_bytes or 0 for memory in played.memory),
            n_judged=1,
        )

    def _bisect(self, plan: PipelinePlan) -> Iterator[JointPlan]:
        """Looks on every rank for the fewest blocks that keep the cap, in the order of their price."""
        rank_of_stage = stage_ranks(rows_of(plan))
        rank_of = {fqn: rank_of_stage[stage] for stage, blocks in enumerate(plan.stages) for fqn in blocks}
        offers: list[list[BlockCost]] = [[] for _ in range(1 + max(rank_of.values()))]
        for block in self._offers:
            offers[rank_of[block.blocks[0]]].append(block)
        low, high = [0] * len(offers), [len(blocks) for blocks in offers]
        while True:
            counts = [(a + b) // 2 for a, b in zip(low, high)]
            chosen = [fqn for blocks, n in zip(offers, counts) for block in blocks[:n] for fqn in block.blocks]
            simulated = self._simulated(plan, Policy.recompute(chosen))
            yield simulated
            if low == high:
                return
            for rank, n in enumerate(counts):
                fits = simulated.rank_bytes[rank] <= self._cap_bytes
                low[rank], high[rank] = (low[rank], n) if fits else (min(n + 1, high[rank]), high[rank])


def _ms_per_freed_byte(block: BlockCost) -> float:
    more_ms = block.recomputed.backward_ms - block.kept.backward_ms
    return more_ms / (block.kept.saved_bytes - block.recomputed.saved_bytes)
