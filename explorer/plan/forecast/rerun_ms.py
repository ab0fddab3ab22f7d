"""Milliseconds that running a unit again takes: its measured forward, less what the rerun leaves out.

Left out is what lies behind the last tensor that is saved (early stop), and the operators whose results are kept. The
share of both in a block's time is known from its operators, where those were timed one by one; else early stop is taken
by its share of the FLOPs, which says too little of a block whose time is not in its matrix products, and of kept
operators nothing is said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from explorer.plan.forecast.rerun_flops import run_again, stops_inside
from explorer.record.graph import Block, ModelGraph
from explorer.record.measurement import MeasuredBlock, Measurement
from explorer.record.policy import Policy, Unit


def unit_ms(
    measurement: Measurement, graph: ModelGraph | None, unit: Unit, inside: Iterable[Unit], policy: Policy
) -> float | None:
    """On the clock of the hooks that time blocks. Units `inside` run again on their own account as well.

    None: it keeps results of operators, and nobody timed those, or torch's look at them.
    """
    if unit.save_ops and (measurement.times is None or measurement.times.kept_operator_ms is None):
        return None
    again, blocks = 0.0, run_again(graph, unit.blocks, policy)
    for fqn in blocks:
        cost = measurement.by_fqn.get(fqn)
        if cost is None:
            continue
        block = None if graph is None else graph.by_fqn.get(fqn)
        late = policy.stops_early and fqn == blocks[-1]
        share = rerun_share(cost, block if late else None, kept=unit.save_ops)
        if share is None:
            return None
        again += share * (cost.forward.median_ms or 0.0)
    for child in inside if policy.stops_early else ():
        if stops_inside(graph, unit, child):
            entered = Unit(blocks=child.blocks)  # in this rerun what it keeps would have run all the same
            outer, inner = (measurement.by_fqn.get(one.blocks[-1]) for one in (unit, child))
            calls = outer.n_forward / inner.n_forward if outer and inner and inner.n_forward else 1
            again -= calls * (unit_ms(measurement, graph, entered, (), policy) or 0.0)
    return again


def rerun_share(cost: MeasuredBlock, stops_in: Block | None, *, kept: Collection[str] = ()) -> float | None:
    """The part of a block's forward that runs again: until its last saved tensor where it `stops_in` that block."""
    if not cost.operator_ms:
        if kept:
            return None
        return 1.0 if stops_in is None or not stops_in.forward_flops else stops_in.rerun_flops / stops_in.forward_flops
    late = {} if stops_in is None else stops_in.late_op_flops
    again = 0.0
    for op, ms in cost.operator_ms.items():
        if op not in kept:
            behind = late[op] / stops_in.op_flops[op] if stops_in is not None and late.get(op) else 0.0
            again += ms * (1 - behind)
    return again / sum(cost.operator_ms.values())
