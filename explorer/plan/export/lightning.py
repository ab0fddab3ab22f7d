"""PyTorch Lightning: the policy of its FSDP strategy, which names the very modules to wrap."""

from __future__ import annotations

from explorer.plan.export.code import python_file
from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile

LIGHTNING = Target(name="lightning", written_for="Lightning 2.6", checked="executed")


def to_lightning(file: PolicyFile) -> Export:
    """What the strategy does with it is torch's apply_activation_checkpointing, without reentrant autograd."""
    return LIGHTNING.exported(file.policy, python_file(_ABOUT, _BODY, LIGHTNING.recomputed(file.policy)))


_ABOUT = """\
Activation checkpointing of single modules under Lightning's FSDPStrategy.

    model = MyLightningModule()
    strategy = FSDPStrategy(activation_checkpointing_policy=activation_checkpointing_policy(model))

Names are those inside the LightningModule. It is ignored where the model holds checkpoint wrappers already, and names
of parameters gain `_checkpoint_wrapped_module.` in a state_dict that FSDP does not write.
"""
_BODY = """\
from torch.distributed.fsdp.wrap import CustomPolicy


def activation_checkpointing_policy(model):
    wanted = set(map(id, chosen(model).values()))
    return CustomPolicy(lambda module: id(module) in wanted)
"""
