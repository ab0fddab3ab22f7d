"""Hugging Face diffusers: a function that wraps the chosen blocks of a model.

The library's own switch recomputes all blocks that its code hands to a checkpointing function, and no others; which
those are stands in the code of each model. A wrapped forward is recomputed wherever the block is called.
"""

from __future__ import annotations

from explorer.plan.export.code import CHECKPOINT_OPTIONS, WRAPPED, options_of, python_file
from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile

DIFFUSERS = Target(
    name="diffusers",
    written_for="diffusers 0.42",
    options=CHECKPOINT_OPTIONS,
    checked="executed",
)


def to_diffusers(file: PolicyFile) -> Export:
    blocks = DIFFUSERS.recomputed(file.policy)
    return DIFFUSERS.exported(file.policy, python_file(_ABOUT, WRAPPED + _BODY, blocks, options_of(file.policy)))


_ABOUT = """\
Activation checkpointing of single blocks of a diffusers model.

    recompute_blocks(unet)      # once, before training; without enable_gradient_checkpointing()
"""
_BODY = """\
def recompute_blocks(model):
    for block in chosen(model).values():
        recompute(block)
"""
