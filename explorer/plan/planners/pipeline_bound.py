"""A lower bound of the step time of every pipeline plan under a memory cap, from the prices that the search uses.

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

from collections.abc import Sequence
from itertools import accumulate

from explorer.plan.pipeline.actions import Rows
from explorer.plan.pipeline.cuts import balance, n_in_flight
from explorer.plan.pipeline.schedules import SCHEDULES
from explorer.plan.pipeline.stage_costs import state_bytes
from explorer.record.pipeline_cost import ActionCost, BlockCost, PipelineProfile
from explorer.record.run import PipelinePlan


def least_step_ms(
    profile: PipelineProfile, shape: PipelinePlan, rows: Rows, worth: Sequence[bool], cap_bytes: int
) -> float:
    """Lower bound in ms of the step of plans of `shape` (without blocks) whose ranks hold at most `cap_bytes`; infinite
    if there is none. `worth`: whether each block may be recomputed."""
    m = shape.n_microbatches
    scale = profile.batch_rows / m / profile.n_rows
    known = SCHEDULES.get(shape.schedule)
    if shape.actions or known is None or known.shape != "single":
        return m * scale * sum(_least_ms(block) for block in profile.blocks) / len(rows)
    stages = _Stages(profile, shape, n_in_flight(rows), worth, cap_bytes)
    n = len(profile.blocks)
    starts = balance(n, len(shape.stages), stages.weight_ms)
    ends = (*starts[1:], n)
    return max(stages.weight_ms(j, a, b) for j, (a, b) in enumerate(zip(starts, ends, strict=True)))


class _Stages:
    """Lower bounds of the step by the work of a rank with one stage."""

    def __init__(
        self,
        profile: PipelineProfile,
        shape: PipelinePlan,
        flying: tuple[int, ...],
        worth: Sequence[bool],
        cap_bytes: int,
    ) -> None:
        blocks, m = profile.blocks, shape.n_microbatches
        scale = profile.batch_rows / m / profile.n_rows
        self._profile, self._cap, self._flying, self._m = profile, cap_bytes, flying, m
        self._n_stages = len(shape.stages)
        self._before = [0.0, *accumulate(scale * _whole_ms(block) for block in blocks)]
        self._static = [0, *accumulate(block.parameter_bytes for block in blocks)]
        self._trained = [0, *accumulate(block.gradient_bytes for block in blocks)]
        self._saved = [0, *accumulate(round(scale * block.kept.saved_bytes) for block in blocks)]
        # The cut is not known, so the narrowest border counts.
        self._buffer = round(scale * min((block.output_bytes for block in blocks[:-1]), default=0))
        again = {"always": m, "except_last": m - 1, "never": 0}[shape.checkpoint]
        self._offers = sorted(
            (
                (again * scale * _more_ms(block), round(scale * block.kept.saved_bytes) - least, k)
                for k, block in enumerate(blocks)
                if worth[k] and (least := round(scale * block.recomputed.saved_bytes)) < scale * block.kept.saved_bytes
            ),
            key=lambda offer: offer[0] / max(offer[1], 1),
        )
        if not again:
            self._offers = []

    def weight_ms(self, stage: int, first: int, end: int) -> float:
        """Rule 1 for blocks first..end-1 as `stage`; infinite if the blocks cannot fit."""
        overhead = self._profile.overhead
        own = self._before[end] - self._before[first] + (overhead.forward_ms + overhead.backward_ms) * (end > first)
        return self._before[first] + self._m * own + self._recompute_ms(stage, first, end)

    def _recompute_ms(self, stage: int, first: int, end: int) -> float:
        """Rule 2, over all microbatches."""
        flying = self._flying[stage]
        n_borders = (stage > 0) + (stage < self._n_stages - 1)
        held = self._static[end] - self._static[first] + n_borders * self._m * self._buffer
        held += state_bytes(self._profile.spec, self._trained[end] - self._trained[first])
        excess = held + flying * (self._saved[end] - self._saved[first]) - self._cap
        taken = 0.0
        for ms, freed, k in self._offers:
            if excess <= 0:
                break
            if first <= k < end:
                share = min(1.0, excess / (flying * freed))
                taken += share * ms
                excess -= flying * freed
        return taken if excess <= 0 else float("inf")


def _whole_ms(block: BlockCost) -> float:
    """Forward and undivided backward, kept or recomputed, whichever is quicker."""
    return min(cost.forward_ms + cost.backward_ms for cost in (block.kept, block.recomputed))


def _more_ms(block: BlockCost) -> float:
    return max(block.recomputed.forward_ms + block.recomputed.backward_ms - _whole_ms(block), 0.0)


def _least_ms(block: BlockCost) -> float:
    """Forward and backward, undivided or split, whichever is quicker."""
    return min(cost.forward_ms + _back_ms(cost) for cost in (block.kept, block.recomputed))


def _back_ms(cost: ActionCost) -> float:
    return cost.backward_ms if cost.split is None else min(cost.backward_ms, cost.split.input_ms + cost.split.weight_ms)
