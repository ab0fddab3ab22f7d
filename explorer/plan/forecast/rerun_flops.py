"""FLOPs that recomputing a unit would add: its forward, of its last block only until the last tensor is saved.

torch.utils.checkpoint stops there (`early_stop`, non-reentrant only): a block that ends in a matrix product, whose
result only others keep, does not run that product again. One that ends in another unit stops where that is entered.
A segment stops in its last block that saves a tensor. A unit that saves none never runs again.
Source: https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from explorer.plan.names import Fqns, is_within
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy, Unit


def run_again(graph: ModelGraph | None, blocks: Fqns, policy: Policy) -> Fqns:
    """The blocks of a unit whose forward runs again, in part at least; all of them without the `graph`."""
    if graph is None or policy.use_reentrant:
        return blocks
    n_saving = max((n for n, fqn in enumerate(blocks, start=1) if fqn not in graph.saves_nothing), default=0)
    return blocks[:n_saving] if policy.stops_early or not n_saving else blocks


def rerun_flops(measurement: Measurement, graph: ModelGraph | None, unit: Fqns, policy: Policy) -> int:
    """What a step that kept `unit` would add; the whole forward without the `graph`, which knows what is saved last."""
    blocks = run_again(graph, unit, policy)
    costs = [measurement.by_fqn[fqn] for fqn in blocks if fqn in measurement.by_fqn]
    total = sum(cost.forward_flops for cost in costs)
    last = graph.by_fqn.get(blocks[-1]) if graph is not None and blocks else None
    if last is None or not costs or not last.forward_flops or not policy.stops_early:
        return total
    return total - round(costs[-1].forward_flops * (1 - last.rerun_flops / last.forward_flops))


def unit_flops(
    measurement: Measurement, graph: ModelGraph | None, unit: Unit, inside: Iterable[Unit], policy: Policy
) -> int | None:
    """As above, of a unit with other units `inside`: each of those runs again on its own account as well.

    None: it keeps results of operators whose FLOPs were not counted.
    """
    again = rerun_flops(measurement, graph, unit.blocks, policy)
    if unit.action == "save_ops":
        kept = _kept_flops(measurement, graph, unit, policy)
        return None if kept is None else again - kept
    if not policy.stops_early:
        return again
    for child in inside:
        if stops_inside(graph, unit, child):
            outer, inner = (measurement.by_fqn.get(one.blocks[-1]) for one in (unit, child))
            share = outer.n_forward / inner.n_forward if outer and inner and inner.n_forward else 1
            return again - round(rerun_flops(measurement, graph, child.blocks, policy) * share)
    return again


def _kept_flops(measurement: Measurement, graph: ModelGraph | None, unit: Unit, policy: Policy) -> int | None:
    """What running `unit` again would spend on the operators whose results it keeps."""
    kept, blocks = 0, run_again(graph, unit.blocks, policy)
    for fqn in blocks:
        block, cost = None if graph is None else graph.by_fqn.get(fqn), measurement.by_fqn.get(fqn)
        if block is None or cost is None or (block.forward_flops and not block.op_flops):
            return None
        ran = Counter(block.op_flops)
        if policy.stops_early and fqn == blocks[-1]:
            ran.subtract(block.late_op_flops)
        share = sum(ran[op] for op in set(unit.save_ops))
        kept += round(cost.forward_flops * share / block.forward_flops) if share else 0
    return kept


def stops_inside(graph: ModelGraph | None, unit: Unit, child: Unit) -> bool:
    """Whether the last tensor that `unit` saves is saved in `child`, which lies in it."""
    blocks = run_again(graph, unit.blocks, Policy())
    last = graph.by_fqn.get(blocks[-1]) if graph is not None and blocks else None
    return last is not None and any(is_within(last.last_saved_in, fqn) for fqn in child.blocks if last.last_saved_in)
