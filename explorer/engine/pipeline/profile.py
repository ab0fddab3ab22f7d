"""The price list behind every prediction: each stretch between two legal cuts, run as a stage of its own.

The finest split there is, two microbatches one after the other, once with everything kept and once with everything
recomputed, each with its backward whole (B) and in two (I, W). From these come time, saved bytes and peaks of each
stretch; sums of them are stages, and played by the clock a step.

A stage pays some of an action's time once, however many stretches it holds. How much, the same model in two stages
tells: its second stage against the sum of the stretches that it is made of.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import msgspec
from torch import Tensor
from torch.utils._pytree import tree_leaves

from explorer.engine.device.device import device_of
from explorer.engine.model.load import load_for
from explorer.engine.model.loaded import Loaded
from explorer.engine.pipeline.cut.build import Pipeline, build
from explorer.engine.pipeline.profile_stages import N_MICROBATCHES, StageBench, n_bytes
from explorer.engine.step import split
from explorer.engine.world.as_found import left_as_found
from explorer.errors import BadInput, InvalidPlan
from explorer.plan.pipeline.cuts import Stages
from explorer.plan.pipeline.stage_costs import special_units
from explorer.record.pipeline_cost import ActionCost, BlockCost, PipelineProfile, StageOverhead
from explorer.record.pipeline_plan import PipelinePlan
from explorer.record.policy import KEEP_ALL, Policy
from explorer.record.progress import Progress, Report, silent
from explorer.record.run import RunSpec

TURNS = ("pricing blocks, kept", "pricing blocks, recomputed", "pricing blocks, as chosen")
"""What progress says."""
N_TIMED = 3
"""Passes; each gives every forward of a stretch twice, and once a backward that finds gradients to add to."""
N_PASSES = 2 * (2 + 2 * N_TIMED) + 4
"""Passes of the finest split and of two stages: first looks, timed ones, and four with memory recorded."""


def profile_blocks(
    spec: RunSpec, groups: Stages, report: Report = silent, *, n_microbatches: int = 8, loaded: Loaded | None = None
) -> PipelineProfile:
    """Costs of each of `groups` (plan.cuts.atoms) for a microbatch of 1/`n_microbatches` of the batch.

    Of the policy of `spec` only what saves operators or offloads matters, and nothing of the plan. Raises InvalidPlan
    where the model cannot be cut there, and what
    load, prepare and the model raise.
    """
    with left_as_found():
        loaded = loaded or load_for(spec)
        small, n_rows, batch_rows = _cut_batch(loaded, n_microbatches)
        plan = PipelinePlan(stages=groups, n_microbatches=N_MICROBATCHES, schedule="GPipe")
        fine = msgspec.structs.replace(spec, plan=plan, policy=KEEP_ALL)
        kept = _measured(fine, small, report)
        again = [group for j, group in enumerate(groups) if j not in kept.overwriting]
        everything = Policy.recompute([fqn for group in again for fqn in group])
        recomputed = _measured(msgspec.structs.replace(fine, policy=everything), small, report, 1)
        chosen = _as_chosen(fine, spec.policy, small, report)
        overhead = _mean([kept.overhead, recomputed.overhead])
        pipeline = kept.pipeline
        gradients = [sum(n_bytes(p) for p in module.parameters() if p.requires_grad) for module in pipeline.modules]
        return PipelineProfile(
            spec=spec,
            environment=device_of(pipeline.trainee.device).environment(spec.n_threads),
            n_rows=n_rows,
            batch_rows=batch_rows,
            blocks=tuple(
                BlockCost(
                    blocks=group,
                    kept=_without(overhead, kept.costs[j]),
                    recomputed=_without(overhead, recomputed.costs[j]),
                    chosen=_without(overhead, chosen[group]) if group in chosen else None,
                    parameter_bytes=stage.parameter_bytes,
                    gradient_bytes=gradients[j],
                    output_bytes=0 if j == len(groups) - 1 else sum(m.n_bytes for m in pipeline.parts[j].metas_out),
                    passed_bytes=kept.passed[j],
                    returned_bytes=sum(m.n_bytes for m in pipeline.parts[j].metas_out),
                    loss_bytes=kept.loss_bytes if j == len(groups) - 1 else 0,
                )
                for j, (group, stage) in enumerate(zip(groups, pipeline.stages(), strict=True))
            ),
            overhead=overhead,
        )


def _as_chosen(spec: RunSpec, policy: Policy, loaded: Loaded, report: Report) -> dict[tuple[str, ...], ActionCost]:
    """Costs of the stretches that the policy neither keeps nor recomputes whole."""
    assert spec.plan is not None
    units = special_units(policy, spec.plan)
    if not units:
        return {}
    measured = _measured(
        msgspec.structs.replace(spec, policy=msgspec.structs.replace(policy, units=units)), loaded, report
    )
    on = {fqn for unit in units for fqn in unit.blocks}
    return {group: cost for group, cost in zip(spec.plan.stages, measured.costs, strict=True) if on & set(group)}


def _cut_batch(loaded: Loaded, n_microbatches: int) -> tuple[Loaded, int, int]:
    """A batch of two microbatches; rows of one of them, and of the whole batch."""
    tensors = [leaf for leaf in tree_leaves(loaded.inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    batch_rows = tensors[0].shape[0] if tensors else 0
    if batch_rows < 2:
        raise InvalidPlan(
            f"The batch has {batch_rows} rows: it cannot be cut into microbatches.", hint="Take a larger batch."
        )
    wanted = max(1, min(n_microbatches, batch_rows) // N_MICROBATCHES)
    n_parts = max(n for n in range(1, wanted + 1) if batch_rows % (n * N_MICROBATCHES) == 0 or n == 1)
    try:
        inputs, targets = split(loaded.inputs, loaded.targets, n_parts)[0]
    except BadInput as error:
        raise InvalidPlan(error.sentence, hint=error.hint) from error
    return (
        Loaded(loaded.ref, loaded.model, inputs, targets, loaded.loss_function),
        (batch_rows // n_parts // N_MICROBATCHES),
        batch_rows,
    )


@dataclass(frozen=True)
class _Measured:
    """What one policy gave: a cost a stretch, overhead included, and how large that is."""

    pipeline: Pipeline
    costs: list[ActionCost]
    passed: dict[int, int]
    overhead: StageOverhead
    loss_bytes: int
    overwriting: set[int]
    """Stretches that a checkpoint could not run again: their price is that of keeping."""


def _measured(spec: RunSpec, loaded: Loaded, report: Report, turn: int = 0) -> _Measured:
    """`turn` counts the policies that were measured before this one."""
    assert spec.plan is not None
    n_done = turn * N_PASSES

    def tick() -> None:
        nonlocal n_done
        report(Progress(what=TURNS[turn], done=n_done, total=N_PASSES * max(2, turn + 1)))
        n_done += 1

    groups = spec.plan.stages
    fine, long = StageBench(build(spec, loaded), tick), None
    if len(groups) > 2:
        two = msgspec.structs.replace(spec.plan, stages=(groups[0], sum(groups[1:], ())))
        long = StageBench(build(msgspec.structs.replace(spec, plan=two), loaded), tick)
    for _ in range(N_TIMED):  # in turns, so that a slow moment of the machine meets both
        for bench in (fine, long):
            if bench is not None:
                bench.time()
    per_block = _weight_ms_per_block(fine, long)
    costs, overhead = fine.costs(per_block), _overhead(fine, long)
    return _Measured(fine.pipeline, costs, fine.passed, overhead, fine.loss_bytes, fine.overwriting)


def _overhead(fine: StageBench, long: StageBench | None) -> StageOverhead:
    """By how much each joint between stretches shortens an action; noise must not eat more than half of a stretch."""

    def joint_ms(kind: str) -> float:
        if long is None or (kind == "I" and (fine.split is None or long.split is None)):
            return 0.0
        alone = [fine.least_ms(j, kind) for j in range(1, len(fine.pipeline.parts))]
        return min(max(sum(alone) - long.least_ms(1, kind), 0.0) / (len(alone) - 1), statistics.mean(alone) / 2)

    return StageOverhead(forward_ms=joint_ms("F"), backward_ms=joint_ms("B"), input_ms=joint_ms("I"))


def _weight_ms_per_block(fine: StageBench, long: StageBench | None) -> float:
    """What W of a stretch takes more for every stretch before it: the sum of it grows with their pairs."""
    if long is None or fine.split is None or long.split is None:
        return 0.0
    alone = [fine.ms(j, "W") for j in range(1, len(fine.pipeline.parts))]
    return max(long.ms(1, "W") - sum(alone), 0.0) / (len(alone) * (len(alone) - 1) / 2)


def _mean(overheads: list[StageOverhead]) -> StageOverhead:
    return StageOverhead(
        forward_ms=statistics.mean(one.forward_ms for one in overheads),
        backward_ms=statistics.mean(one.backward_ms for one in overheads),
        input_ms=statistics.mean(one.input_ms for one in overheads),
    )


def _without(overhead: StageOverhead, cost: ActionCost) -> ActionCost:
    split = cost.split
    if split is not None:
        split = msgspec.structs.replace(split, input_ms=max(split.input_ms - overhead.input_ms, 0.0))
    return msgspec.structs.replace(
        cost,
        forward_ms=max(cost.forward_ms - overhead.forward_ms, 0.0),
        backward_ms=max(cost.backward_ms - overhead.backward_ms, 0.0),
        split=split,
    )
