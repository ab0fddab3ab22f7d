"""How much longer a step takes when units of it run again: their measured forward, less what early stop leaves out.

A block's forward is timed under light hooks and brought to the scale of the steps that were timed without them. What
early stop leaves out is taken by its share of the FLOPs. A unit inside another runs again twice, with the outer one and
on its own account, unless the outer one's recompute ends where it is entered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from explorer.plan.forecast.rerun_flops import nested_rerun_flops
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy, Unit


def time_ratio(
    baseline: Measurement, graph: ModelGraph | None, inside: Mapping[Unit, Sequence[Unit]], policy: Policy
) -> float | None:
    """Step time over that of the measured `baseline`; None where that has no times. `inside`: units by their holder."""
    root, times = baseline.by_fqn.get(""), baseline.times
    if root is None or times is None:
        return None
    step, whole, hooked = times.step.median_ms, times.forward.median_ms, root.forward.median_ms
    if not step or not whole or not hooked:
        return None
    again = 0.0
    for unit, children in inside.items():
        costs = [baseline.by_fqn[fqn] for fqn in unit.blocks if fqn in baseline.by_fqn]
        flops = sum(cost.forward_flops for cost in costs)
        share = nested_rerun_flops(baseline, graph, unit, children, policy) / flops if flops else 1.0
        again += share * sum(cost.forward.median_ms or 0.0 for cost in costs)
    return 1 + again * whole / hooked / step
