"""MosaicML llm-foundry: a list of block numbers in the model's configuration."""

from __future__ import annotations

from explorer.plan.export.layers import layers_of
from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile

LLM_FOUNDRY = Target(name="llm-foundry", written_for="llm-foundry of 2025-07 (8c8dd48)", nested=False)


def to_llm_foundry(file: PolicyFile) -> Export:
    """A list: an integer n would be the first n blocks."""
    blocks = LLM_FOUNDRY.recomputed(file.policy)
    layers = layers_of(blocks) if blocks else None
    if isinstance(layers, str):
        return LLM_FOUNDRY.refused(layers, "Choose whole layers, or export for composer.")
    numbers = list(layers.chosen) if layers is not None else []
    text = f"""\
model:
  activation_checkpointing_target:
    mptblock: {numbers}
fsdp_config:
  activation_checkpointing: {str(bool(numbers)).lower()}
  activation_checkpointing_reentrant: false
"""
    return LLM_FOUNDRY.exported(file.policy, text, note="The numbers count the blocks of an MPT model.")
