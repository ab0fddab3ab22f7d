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
