"""Settings for a model of eight layers, and that model where each layer hands on to the next."""

from __future__ import annotations

import msgspec

from explorer.record.graph import Block, ModelGraph

LAYERS = tuple(f"layers.{i}" for i in range(8))
FULL = "--recompute-granularity full --recompute-method"


def joinable(graph: ModelGraph) -> ModelGraph:
    """The same where each layer hands on to the next."""
    blocks: list[Block] = []
    for block in graph.blocks:
        before = f"layers.{int(block.name) - 1}" if block.fqn in LAYERS[1:] else ""
        blocks.append(msgspec.structs.replace(block, follows=before))
    return msgspec.structs.replace(graph, blocks=tuple(blocks))
