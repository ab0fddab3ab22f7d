"""Units that a planner is offered besides plain recompute: blocks of which some operators' results are kept (save_ops).

Of each block that presets count: all its matrix products, attentions and convolutions, and each kind of them by itself.
They are offered where they have a price: where the operators of the step were timed one by one. Neither inside another
unit nor around one: nobody has tried what torch's caches do there.
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
"""Of a model with more none is offered: a program stays a matter of seconds."""


def keeping_units(baseline: Measurement, graph: ModelGraph, replay: Replay) -> Iterator[Unit]:
    """In the order of the blocks."""
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
    """Whether it may stand neither inside another unit nor around one."""
    return unit.action != "recompute"
