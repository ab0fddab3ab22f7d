"""Hugging Face diffusers: a checkpointing function that looks at the block it is handed.

The library's models hand a block first and its arguments behind it, wherever they may recompute; a function of one's
own decides there. A block that no such place names is never recomputed.
"""

from __future__ import annotations

from explorer.plan.export.code import CHECKPOINT_OPTIONS, options_of, python_file
from explorer.plan.export.outcome import Target
from explorer.record.export import Export
from explorer.record.policy_file import PolicyFile

DIFFUSERS = Target(
    name="diffusers",
    written_for="diffusers 0.42",
    options=CHECKPOINT_OPTIONS,
    checked="executed",
)


def to_diffusers(file: PolicyFile) -> Export:
    blocks = DIFFUSERS.recomputed(file.policy)
    text = python_file(_ABOUT, _BODY, blocks, options_of(file.policy))
    return DIFFUSERS.exported(file.policy, text, note=_NOTE)


_NOTE = "diffusers recomputes a block only where its own code may; after a step never_asked() names what it left out."


_ABOUT = """\
Activation checkpointing of single blocks of a diffusers model.

    recompute_blocks(unet)      # once, before training
    never_asked()               # after a step: blocks that the library itself never recomputes
"""
_BODY = '''\
import torch.utils.checkpoint

_ASKED = {name: False for name in BLOCKS}


def recompute_blocks(model):
    name_of = {id(module): name for name, module in chosen(model).items()}

    def run(block, *arguments):
        name = name_of.get(id(block)) or name_of.get(id(getattr(block, "__self__", None)))
        if name is None:
            return block(*arguments)
        _ASKED[name] = True
        return torch.utils.checkpoint.checkpoint(block, *arguments, **OPTIONS)

    model.enable_gradient_checkpointing(gradient_checkpointing_func=run)


def never_asked():
    """Chosen blocks that no forward has handed to the checkpointing function: they are kept."""
    return [name for name, asked in _ASKED.items() if not asked]
'''
