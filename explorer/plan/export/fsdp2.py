"""FSDP2: the order in which blocks are recomputed, sharded and compiled, for a training script of torch alone."""

from __future__ import annotations

from explorer.plan.export.code import options_of, python_file
from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile

FSDP2 = Target(
    name="fsdp2",
    written_for="torch 2.13",
    options=("preserve_rng_state", "determinism_check", "early_stop", "use_reentrant"),
    checked="executed",
)


def to_fsdp2(file: PolicyFile) -> Export:
    blocks, options = FSDP2.recomputed(file.policy), options_of(file.policy, without=("use_reentrant",))
    body = _BODY.replace("@IMPL@", "REENTRANT" if file.policy.use_reentrant else "NO_REENTRANT")
    return FSDP2.exported(file.policy, python_file(_ABOUT, body, blocks, options))


_ABOUT = """\
Activation checkpointing before FSDP2.

    recompute_then_shard(model, mesh=mesh)      # 1. recompute, 2. shard the recomputed blocks, 3. shard the rest

The wrapper lies inside the sharded block, so parameters are gathered again before a block runs again. Compile blocks,
if at all, between 1 and 2. Names of parameters gain `_checkpoint_wrapped_module.`, in a state_dict they do not.
"""
_BODY = """\
from functools import partial

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy


def recompute(model):
    wanted = set(map(id, chosen(model).values()))
    wrap = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.@IMPL@, **OPTIONS)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrap, auto_wrap_policy=CustomPolicy(lambda module: id(module) in wanted)
    )


def recompute_then_shard(model, **sharding):
    recompute(model)
    for name, module in reversed(list(chosen(model).items())):  # inner blocks before those around them
        fully_shard(module, **sharding)
    return fully_shard(model, **sharding)
"""
