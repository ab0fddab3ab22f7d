"""FlagScale: Megatron-LM with the recompute flags of every stage and microbatch, so that a plan's checkpoint mode is
said too: always, never, and all microbatches but the last.
"""

from __future__ import annotations

from explorer.errors import InvalidPlan
from explorer.plan.export.layers import layers_of
from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile
from explorer.record.run import PipelinePlan

FLAGSCALE = Target(
    name="flagscale", written_for="FlagScale of 2025-11 (16a2dd5)", fixed=(("use_reentrant", True),), nested=False
)


def to_flagscale(file: PolicyFile) -> Export:
    """One row a stage. Raises InvalidPlan where the file has no plan."""
    plan = file.pipeline
    if plan is None:
        raise InvalidPlan(
            "The policy file holds no pipeline plan, and FlagScale asks for stages and microbatches.",
            hint="`python -m explorer pipeline MODEL --stages 4 --out FILE` writes one; megatron needs none.",
        )
    blocks = FLAGSCALE.recomputed(file.policy)
    layers = layers_of(blocks) if blocks else None
    if isinstance(layers, str):
        return FLAGSCALE.refused(layers, "Choose whole layers.")
    stages = layers.stages(plan) if layers is not None else [[] for _ in plan.stages]
    counts = [len([number for number in stage if layers and number in layers.chosen]) for stage in stages]
    there = layers.names(number for stage, n in zip(stages, counts) for number in stage[:n]) if layers else ()
    rows = {
        "recompute_granularity_per_stage_micro_batch": [_row(plan, int(n > 0)) for n in counts],
        "recompute_method_per_stage_micro_batch": [_row(plan, 1) for _ in counts],
        "recompute_num_layers_per_stage_micro_batch": [_row(plan, n) for n in counts],
    }
    text = "recompute_granularity: full\nrecompute_method: block\nrecompute_num_layers: 1\n"
    text += "".join(f"{key}:\n" + "".join(f"  - {row}\n" for row in values) for key, values in rows.items())
    return FLAGSCALE.exported(file.policy, text, there=there)


def _row(plan: PipelinePlan, value: int) -> list[int]:
    """[stages, microbatches, value, microbatches, value]: this stage, as the plan's checkpoint mode has it."""
    n = plan.n_microbatches
    if plan.checkpoint == "never":
        return [1, n, 0]
    if plan.checkpoint == "except_last":
        return [1, n - 1, value, 1, 0] if n > 1 else [1, 1, 0]
    return [1, n, value]
