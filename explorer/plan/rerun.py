"""FLOPs that recomputing a unit would add: its forward, of its last block only until the last tensor is saved.

torch.utils.checkpoint stops there (`early_stop`, non-reentrant only): a block that ends in a matrix product, whose
result only others keep, does not run that product again.
Source: https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

from collections.abc import Sequence

from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy


def rerun_flops(measurement: Measurement, graph: ModelGraph | None, unit: Sequence[str], policy: Policy) -> int:
    """Of a step that kept `unit`. Without the `graph`, which knows what is saved last, the whole forward."""
    bills = [measurement.by_fqn[fqn] for fqn in unit if fqn in measurement.by_fqn]
    total = sum(bill.forward_flops for bill in bills)
    last = graph.by_fqn.get(unit[-1]) if graph is not None else None
    if last is None or not bills or not last.forward_flops or not policy.stops_early:
        return total
    return total - round(bills[-1].forward_flops * (1 - last.rerun_flops / last.forward_flops))
