"""Equal siblings take equal times: what each was measured with differs by noise, so each is given the mean of all.

Whoever prices a policy reads the times from here: then a plan says of it what a forecast does, and does not choose
among equal blocks the one that the clock happened to favour.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

import msgspec

from explorer.record.graph import ModelGraph
from explorer.record.measurement import MeasuredBlock, Measurement, Samples


def kin_of(graph: ModelGraph, fqn: str) -> str:
    """`fqn` with the numbers of repeated blocks replaced by those of the first of their run, and its FLOPs."""
    parts = fqn.split(".")
    for n in range(1, len(parts) + 1):
        block = graph.by_fqn.get(".".join(parts[:n]))
        if block is not None and block.repeat_of is not None:
            parts[:n] = block.repeat_of.split(".")
    block = graph.by_fqn.get(fqn)
    return f"{'.'.join(parts)} {block.forward_flops if block else 0}"


def with_equal_times(measurement: Measurement, graph: ModelGraph) -> Measurement:
    """`measurement` with one forward time, that of all of its kin, in each block that has any."""
    kin: dict[str, list[MeasuredBlock]] = defaultdict(list)
    for cost in measurement.blocks:
        if cost.fqn in graph.by_fqn and cost.forward.median_ms is not None:
            kin[kin_of(graph, cost.fqn)].append(cost)
    means = ((equal, _mean(equal)) for equal in kin.values() if len(equal) > 1)
    times = {one.fqn: mean for equal, mean in means for one in equal}
    blocks = tuple(
        msgspec.structs.replace(cost, **times[cost.fqn]) if cost.fqn in times else cost for cost in measurement.blocks
    )
    return msgspec.structs.replace(measurement, blocks=blocks)


def _mean(equal: list[MeasuredBlock]) -> dict[str, object]:
    ops = {op for one in equal for op in one.operator_ms} if all(one.operator_ms for one in equal) else ()
    return {
        "forward": Samples(ms=(fmean(one.forward.median_ms or 0.0 for one in equal),)),
        "operator_ms": {op: fmean(one.operator_ms.get(op, 0.0) for one in equal) for op in sorted(ops)},
    }
