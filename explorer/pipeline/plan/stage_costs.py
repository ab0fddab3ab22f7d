"""Costs of stages from costs of blocks: a prediction for any cut, schedule, microbatch count and policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from explorer.errors import BadInput, InvalidPlan
from explorer.pipeline.plan.actions import stage_ranks
from explorer.pipeline.plan.clock import forecast
from explorer.pipeline.plan.schedules import rows_of
from explorer.pipeline.record.step import (
    ActionCost,
    BlockCost,
    PipelineProfile,
    PlayedSchedule,
    RankMemory,
    StageCost,
    StageOverhead,
)
from explorer.record.policy import Policy
from explorer.record.run import PipelinePlan, RunSpec


def predict(profile: PipelineProfile, plan: PipelinePlan, policy: Policy) -> PlayedSchedule:
    """Step time, bubble and memory by rank, before any run. Raises InvalidPlan, also if a backward is split in two.

    Blocks that the policy recomputes count as recomputed whole, others as the profile measured them under it; a
    segment keeps its input only.
    """
    costs = stage_costs(profile, plan, policy)
    played = forecast(plan, costs)
    home = stage_ranks(rows_of(plan))

    def with_state(memory: RankMemory) -> RankMemory:
        trained = sum(cost.gradient_bytes for cost in costs if home[cost.stage] == memory.rank)
        return replace(memory, optimizer_bytes=state_bytes(profile.spec, trained))

    return replace(played, memory=tuple(map(with_state, played.memory)))


def state_bytes(spec: RunSpec, trained_bytes: int) -> int:
    """Bytes of optimizer state for parameters of `trained_bytes`: two moments (AdamW), one (SGD with momentum)."""
    if spec.optimizer == "adamw8bit":
        raise BadInput("The stages of a pipeline have no price for moments in 8 bits.", hint="Choose adamw or sgd.")
    n_copies = {"adamw": 2, "sgd": 1 if spec.momentum else 0, "none": 0}[spec.optimizer]
    return n_copies * trained_bytes


def stage_costs(profile: PipelineProfile, plan: PipelinePlan, policy: Policy) -> tuple[StageCost, ...]:
    """The cost of each stage, scaled from the profile's microbatch to the plan's. Raises InvalidPlan."""
    parts, m = _parts(profile, plan), plan.n_microbatches
    before = [None, *(blocks[-1] for blocks in parts[:-1])]
    positions = [StagePosition(stage, len(parts), m, sender) for stage, sender in enumerate(before)]
    return tuple(stage_cost(profile, position, parts[position.stage], policy) for position in positions)


class StagePosition(NamedTuple):
    """The position of a stage in a pipeline, and the block that sends to the stage."""

    stage: int
    n_stages: int
    n_microbatches: int
    before: BlockCost | None
    """The last block of the stage before."""


def stage_cost(
    profile: PipelineProfile, position: StagePosition, blocks: Sequence[BlockCost], policy: Policy
) -> StageCost:
    """The price of `blocks` as the stage at `position`, kept and under the policy."""
    scale = profile.batch_rows / position.n_microbatches / profile.n_rows
    blocks = _with_segments(list(blocks), policy)
    kept_costs = _add_up(blocks, [block.kept for block in blocks], scale)
    under = _add_up(blocks, [_under(block, policy) for block in blocks], scale)
    return StageCost(
        stage=position.stage,
        kept=_of_stage(kept_costs, profile.overhead),
        recomputed=_of_stage(under, profile.overhead),
        parameter_bytes=sum(block.parameter_bytes for block in blocks),
        gradient_bytes=sum(block.gradient_bytes for block in blocks),
        receive_bytes=round(scale * position.before.output_bytes) if position.before is not None else 0,
        gradient_receive_bytes=round(scale * blocks[-1].output_bytes) if position.stage < position.n_stages - 1 else 0,
        passed_bytes=round(scale * min(block.passed_bytes for block in blocks)),
        loss_bytes=round(scale * blocks[-1].loss_bytes),
    )


def _under(block: BlockCost, policy: Policy) -> ActionCost:
    actions = {unit.action for unit in policy.units if set(unit.blocks) & set(block.blocks)}
    if not actions:
        return block.kept
    return block.recomputed if actions == {"recompute"} or block.chosen is None else block.chosen


def _of_stage(cost: ActionCost, overhead: StageOverhead) -> ActionCost:
    """The cost of blocks as a stage, which adds the overhead of a stage once."""
    forward_ms, backward_ms = cost.forward_ms + overhead.forward_ms, cost.backward_ms + overhead.backward_ms
    return replace(cost, forward_ms=forward_ms, backward_ms=backward_ms)


def _parts(profile: PipelineProfile, plan: PipelinePlan) -> list[list[BlockCost]]:
    """The profile's entries of each stage."""
    stage_of = {fqn: stage for stage, blocks in enumerate(plan.stages) for fqn in blocks}
    parts: list[list[BlockCost]] = [[] for _ in plan.stages]
    for cost in profile.blocks:
        homes = {stage_of.get(fqn) for fqn in cost.blocks}
        if len(homes) != 1 or None in homes:
            raise InvalidPlan(
                f"{', '.join(cost.blocks)} stay together, but the plan has them in stages {sorted(map(str, homes))}.",
                hint="Cut only at legal cut points, and profile the model that the plan was made for.",
            )
        parts[homes.pop() or 0].append(cost)
    if empty := [stage for stage, part in enumerate(parts) if not part]:
        raise InvalidPlan(f"Stages {empty} hold no block of the profiled model.", hint="Every stage needs a block.")
    return parts


def _with_segments(blocks: list[BlockCost], policy: Policy) -> list[BlockCost]:
    """`blocks` with the blocks of each segment merged into one entry."""
    for unit in policy.units:
        places = [k for k, block in enumerate(blocks) if set(block.blocks) & set(unit.blocks)]
        if len(places) > 1:
            first, end = places[0], places[-1] + 1
            blocks = [*blocks[:first], _segment(blocks[first:end]), *blocks[end:]]
    return blocks


def _segment(blocks: list[BlockCost]) -> BlockCost:
    """One checkpoint over several blocks: the last block reruns like a single checkpoint, all others rerun in full."""
    *inner, last = blocks
    again = sum(block.kept.saved_bytes for block in inner)
    before = [0, *(block.recomputed.saved_bytes for block in inner)]
    return BlockCost(
        blocks=tuple(fqn for block in blocks for fqn in block.blocks),
        kept=_add_up(blocks, [block.kept for block in blocks], 1.0),
        recomputed=ActionCost(
            forward_ms=sum(block.recomputed.forward_ms for block in blocks),
            backward_ms=sum(b.kept.forward_ms + b.kept.backward_ms for b in inner) + last.recomputed.backward_ms,
            recompute_ms=sum(block.kept.forward_ms for block in inner) + last.recomputed.recompute_ms,
            saved_bytes=last.recomputed.saved_bytes,
            forward_extra_bytes=max(a + b.recomputed.forward_extra_bytes for a, b in zip(before, blocks, strict=True)),
            backward_extra_bytes=again + last.recomputed.backward_extra_bytes,
            first_backward_extra_bytes=again + last.recomputed.first_backward_extra_bytes,
            sent_gradient_bytes=blocks[0].recomputed.sent_gradient_bytes,
        ),
        parameter_bytes=sum(block.parameter_bytes for block in blocks),
        gradient_bytes=sum(block.gradient_bytes for block in blocks),
        output_bytes=last.output_bytes,
        passed_bytes=min(block.passed_bytes for block in blocks),
        returned_bytes=last.returned_bytes,
        loss_bytes=last.loss_bytes,
    )


def _add_up(blocks: Sequence[BlockCost], costs: Sequence[ActionCost], scale: float) -> ActionCost:
    """The cost of consecutive blocks: times add up, and a peak is the worst moment of forward or backward.

    The engine of the stage holds the output of the last block through backward. The output adds to the peak of a block
    once a later block has made a gradient. Until then the gradient is the received one.
    """
    saved = [round(scale * cost.saved_bytes) for cost in costs]
    last, passed = blocks[-1], min(block.passed_bytes for block in blocks)
    returned = round(scale * (max(last.returned_bytes - passed, 0) + last.loss_bytes))
    forward_extra = backward_extra = first_extra = 0
    for k, cost in enumerate(costs):
        forward_extra = max(forward_extra, sum(saved[:k]) + round(scale * cost.forward_extra_bytes))
        behind = costs[k + 1 :]
        freed = sum(saved[k + 1 :]) - (returned if any(cost.sent_gradient_bytes != 0 for cost in behind) else 0)
        made = sum(block.gradient_bytes for block in blocks[k + 1 :])
        backward_extra = max(backward_extra, round(scale * cost.backward_extra_bytes) - freed)
        own = blocks[k].gradient_bytes
        activations = max(cost.first_backward_extra_bytes - own, 0)
        first_extra = max(
            first_extra, made - freed + min(own, cost.first_backward_extra_bytes) + round(scale * activations)
        )
    # A first block that only views its input sends the gradient of the next block.
    sizes = [cost.sent_gradient_bytes for cost in costs]
    sent = next((n_bytes for n_bytes in sizes if n_bytes), sizes[0])
    return ActionCost(
        forward_ms=scale * sum(cost.forward_ms for cost in costs),
        backward_ms=scale * sum(cost.backward_ms for cost in costs),
        recompute_ms=scale * sum(cost.recompute_ms for cost in costs),
        saved_bytes=sum(saved),
        forward_extra_bytes=forward_extra,
        backward_extra_bytes=backward_extra,
        first_backward_extra_bytes=first_extra,
        sent_gradient_bytes=None if sent is None else round(scale * sent),
    )
