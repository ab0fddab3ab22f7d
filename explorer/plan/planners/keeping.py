"""Candidates that keep the results of some operators of a block (save_ops) and recompute the rest.

Each block that presets count offers to keep all its matrix products, attentions and convolutions, or one kind alone.
The units are candidates only if the operators of the step were timed one by one, so that they have a price. A plan
puts such a unit neither inside nor around another unit: torch's caches are not tested there.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from explorer.plan.names import products_kept
from explorer.plan.policy.counted import counted_units
from explorer.plan.predict.calls import results_unknown
from explorer.plan.predict.replay import Replay
from explorer.plan.predict.step_cost import unit_ms
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import KEEP_ALL, Unit

MOST_BLOCKS = 200
"""A model with more counted blocks has no such candidates, so that solving takes seconds."""


def keeping_units(baseline: Measurement, graph: ModelGraph, replay: Replay) -> Iterator[Unit]:
    """Units that keep results, in the order of the blocks."""
    counted = counted_units(graph)
    for blocks in counted if len(counted) <= MOST_BLOCKS else ():
        every = products_kept(blocks, graph)
        if (
            every.save_ops
            and unit_ms(baseline, graph, every, (), KEEP_ALL) is not None
            and not results_unknown(replay, every.save_ops)
        ):
            yield every
            if len(every.save_ops) > 1:
                yield from (msgspec.structs.replace(every, save_ops=(op,)) for op in every.save_ops)


def is_kept_apart(unit: Unit) -> bool:
    """True if the unit may be neither inside nor around another unit."""
    return unit.action != "recompute"
