"""AMD Primus: Megatron-LM with the layers to recompute by their numbers."""

from __future__ import annotations

from explorer.plan.export.layers import layers_of
from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile

PRIMUS = Target(
    name="primus", written_for="Primus of 2026-08-22 (fd1eeab)", fixed=(("use_reentrant", True),), nested=False
)


def to_primus(file: PolicyFile) -> Export:
    """Numbers are global: they mean the same under every pipeline size."""
    blocks = PRIMUS.recomputed(file.policy)
    if not blocks:
        return PRIMUS.exported(file.policy, "recompute_granularity: null\n")
    layers = layers_of(blocks)
    if isinstance(layers, str):
        return PRIMUS.refused(layers, "Choose whole layers.")
    numbers = ",".join(map(str, layers.chosen))
    text = f'recompute_granularity: full\nrecompute_method: null\nrecompute_layer_ids: "{numbers}"\n'
    return PRIMUS.exported(file.policy, text)
