"""torchtitan: an activation-checkpointing class at its override point, which wraps the chosen blocks and no others.

Its own policies treat all blocks of `layers` alike. Where the file holds a pipeline plan, the lists of stages follow.
"""

from __future__ import annotations

from explorer.plan.export.code import options_of, python_file
from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile

TORCHTITAN = Target(
    name="torchtitan",
    written_for="torchtitan 0.3.0",
    options=("preserve_rng_state", "determinism_check", "early_stop"),
    checked="executed",
)


def to_torchtitan(file: PolicyFile) -> Export:
    blocks, options = TORCHTITAN.recomputed(file.policy), options_of(file.policy, without=("use_reentrant",))
    plan = file.pipeline
    body = _BODY
    if plan is not None:
        stages = "".join(f"    {list(stage)!r},\n" for stage in plan.stages)
        body += f"\n\nMODULE_FQNS_PER_MODEL_PART = [\n{stages}]\n"
        body += _OWN if plan.actions else f"PIPELINE_PARALLEL_SCHEDULE = {plan.schedule!r}\n"
    return TORCHTITAN.exported(file.policy, python_file(_ABOUT, body, blocks, options))


_ABOUT = """\
Activation checkpointing of single blocks in torchtitan. Save it as recompute_blocks.py where Python finds it:

    --override.imports recompute_blocks.recompute_blocks activation_checkpoint:selective

Of a pipeline plan, MODULE_FQNS_PER_MODEL_PART goes to parallelism.module_fqns_per_model_part.
"""
_OWN = """\
# An own schedule: `export --to schedule` writes it, for parallelism.pipeline_parallel_schedule_csv.
PIPELINE_PARALLEL_SCHEDULE = "PipelineScheduleMulti"
"""
_BODY = '''\
from dataclasses import dataclass

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.config import derive, override
from torchtitan.distributed import activation_checkpoint
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing, SelectiveAC


class RecomputeBlocks(ActivationCheckpointing):
    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        pass

    def apply(self, model):
        """The blocks that a model part holds: under a pipeline each rank has some of them."""
        held = dict(model.named_modules())
        names = [name for name in BLOCKS if name in held]
        if not names and BLOCKS and not any(name.partition(".")[0] in held for name in BLOCKS):
            raise ValueError(f"{type(model).__name__} has none of the chosen blocks: export the policy for it again.")
        getattr(activation_checkpoint, "_disable_dynamo_lru_cache", lambda: None)()  # as torchtitan's own classes do
        for name in sorted(names, key=len, reverse=True):  # inner blocks before those around them
            parent, _, own = name.rpartition(".")
            model.get_submodule(parent).register_module(own, checkpoint_wrapper(held[name], **OPTIONS))


@override(target=SelectiveAC.Config, description="Recomputes the chosen blocks")
def recompute_blocks(config):
    return derive(config, RecomputeBlocks.Config)
'''
