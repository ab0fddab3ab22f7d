"""Gradients in another layout: what a reentrant unit leaves to the operations of backward behind it.

    x, transposed  ──▶ copy of x that is a leaf ──▶ unit        torch gives a leaf's gradient the layout of the leaf

What needs it row after row (matrix products, norms) copies it for as long as it runs, and the others hand that layout
on: from the first such unit on, one gradient more is held. Where others read x as well, their gradients come first, and
the sum has their layout. Too high by that one gradient where none of these operations runs at the peak.
Source: torch/csrc/autograd/functions/accumulate_grad.h, "Gradient Layout Contract".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from explorer.plan.forecast.replay import Replay
from explorer.plan.forecast.saved_by_call import SavedByCall
from explorer.plan.names import is_within
from explorer.record.graph import ModelGraph
from explorer.record.policy import Unit


def with_copied_gradients(
    replay: Replay, units: Mapping[Unit, list[SavedByCall]], graph: ModelGraph | None
) -> Mapping[Unit, list[SavedByCall]]:
    """Calls of reentrant `units`; the one through first that changes a layout has the copy of the gradient besides."""
    changing = [unit for unit in units if graph is not None and _changes_layout(graph, unit.blocks)]
    through = [(call.ends, unit, i) for unit in changing for i, call in enumerate(units[unit]) if call.inputs]
    if not through:
        return units
    ends, unit, i = min(through, key=lambda one: one[0])
    calls = list(units[unit])
    n_bytes = int(replay.size[list(calls[i].inputs)].max())
    calls[i] = replace(calls[i], copies=(*calls[i].copies, (ends, replay.backward_ends(ends), n_bytes)))
    return {**units, unit: calls}


def _changes_layout(graph: ModelGraph, blocks: Sequence[str]) -> bool:
    """Whether the unit is given what does not lie row after row, and is the only one to read it."""
    first = graph.by_fqn.get(blocks[0])
    if first is None or "strided_inputs" not in first.traits:
        return False

    def is_inside(name: str) -> bool:
        return any(is_within(name.partition(":")[0], fqn) for fqn in blocks)

    given = {(edge.source, edge.data) for edge in graph.edges if is_inside(edge.target) and not is_inside(edge.source)}
    return not any((edge.source, edge.data) in given for edge in graph.edges if not is_inside(edge.target))
