"""A model's own checkpointing in one recorded step: switches, calls of torch.utils.checkpoint, and what trained.

Reruns alone do not show it: a checkpoint that passes no gradient never runs again.
"""

from __future__ import annotations

from explorer.record.base import Count, Record


class CheckpointSwitch(Record):
    """An attribute of a module with which libraries turn checkpointing on."""

    block: str
    name: str
    """`gradient_checkpointing`, `grad_checkpointing`"""
    is_on: bool
    trains: bool
    """Whether the module is in train mode: most libraries ignore the switch in eval mode."""


class CheckpointRegion(Record):
    """Calls of torch.utils.checkpoint from one place of the model that cover the same blocks."""

    caller: str
    """The innermost block whose forward called it; the empty string is the model, or code outside of it."""
    blocks: tuple[str, ...]
    """The outermost blocks that ran inside; empty if the region is code of the caller alone."""
    reentrant: bool
    n_calls: Count = 0
    """Calls with gradients on. A call without gradients is no checkpoint."""
    n_again: Count = 0
    """Reruns in backward."""
    n_without_gradient: Count = 0
    """Calls of the reentrant kind without an input that requires a gradient: they pass no gradient to anything."""


class OwnCheckpointing(Record):
    """What a model checkpoints without a policy, in one step."""

    switches: tuple[CheckpointSwitch, ...] = ()
    regions: tuple[CheckpointRegion, ...] = ()
    n_trainable: Count = 0
    """Parameters that require a gradient."""
    without_gradient: tuple[str, ...] = ()
    """Those that got none in the step and hold none; empty for a step without backward."""
    in_eval: tuple[str, ...] = ()
    """The outermost blocks in eval mode that hold called blocks."""


class WithoutCheckpoint(Record):
    """Names of tensors and state in which each side differs from the step with the model's own checkpointing off."""

    baseline: tuple[str, ...] = ()
    candidate: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    """Parameters that get a gradient in that step, and none in the baseline: no training to be equal to."""
