"""Which results a unit may keep (save_ops), as far as one observed forward can tell."""

from __future__ import annotations

from explorer.record.graph import ModelGraph
from explorer.record.policy import Unit


def written_results(unit: Unit, graph: ModelGraph | None) -> tuple[str, ...]:
    """Those of the unit's `save_ops` that write into an argument, by their names, or whose results the observed forward
    writes into afterwards: torch raises where they are to be kept."""
    known = {} if graph is None else graph.by_fqn
    rewritten = {op for fqn in unit.blocks if fqn in known for op in known[fqn].rewritten_ops}
    return tuple(op for op in unit.save_ops if op in rewritten or any(part.endswith("_") for part in op.split(".")))


def products_kept(blocks: tuple[str, ...], graph: ModelGraph) -> Unit:
    """The unit that recomputes all of `blocks` but what their matrix products, attentions and convolutions return.

    Those are the operators that FLOPs are counted of. Results that something writes into are recomputed as well; where
    none is left, all is recomputed.
    Source: https://pytorch.org/blog/activation-checkpointing-techniques/ (selective activation checkpointing)
    """
    counted = {op for fqn in blocks for op, flops in graph.by_fqn[fqn].op_flops.items() if flops}
    every = Unit(blocks=blocks, action="save_ops", save_ops=tuple(sorted(counted)))
    kept = tuple(op for op in every.save_ops if op not in written_results(every, graph))
    return Unit(blocks=blocks, action="save_ops", save_ops=kept) if kept else Unit(blocks=blocks)
