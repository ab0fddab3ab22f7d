"""MosaicML Composer: the attribute that its FSDP reads on every module."""

from __future__ import annotations

from explorer.plan.export.code import python_file
from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile

COMPOSER = Target(name="composer", written_for="composer 0.32.1", options=("use_reentrant",), checked="executed")


def to_composer(file: PolicyFile) -> Export:
    """Its own default is the reentrant engine: the file says which one is meant."""
    body = _BODY.replace("@REENTRANT@", str(file.policy.use_reentrant))
    return COMPOSER.exported(file.policy, python_file(_ABOUT, body, COMPOSER.recomputed(file.policy)))


_ABOUT = """\
Activation checkpointing of single modules under Composer's FSDP.

    mark(model)                                                 # before the Trainer
    Trainer(model=model, parallelism_config={"fsdp": {**FSDP, ...}})
"""
_BODY = """\
FSDP = {"activation_checkpointing": True, "activation_checkpointing_reentrant": @REENTRANT@}


def mark(model):
    wanted = set(map(id, chosen(model).values()))
    for module in model.modules():
        module._activation_checkpointing = id(module) in wanted
"""
