"""How much longer a step takes when units of it run again: their measured forward, less what early stop leaves out.

A block's forward is timed under light hooks and brought to the scale of the steps that were timed without them. What
early stop leaves out is taken by its share of the FLOPs. A unit inside another runs again twice, with the outer one and
on its own account, unless the outer one's recompute ends where it is entered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from explorer.plan.forecast.rerun_flops import unit_flops
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy, Unit


def time_ratio(
    baseline: Measurement, graph: ModelGraph | None, inside: Mapping[Unit, Sequence[Unit]], policy: Policy
) -> float | None:
    """Step time over that of the measured `baseline`; None where that has no times. `inside`: units by their holder."""
    step, without_hooks = baseline.times.step.median_ms if baseline.times else None, scale(baseline)
    if not step or without_hooks is None:
        return None
    again = 0.0
    for unit, children in inside.items():
        costs = [baseline.by_fqn[fqn] for fqn in unit.blocks if fqn in baseline.by_fqn]
        flops = sum(cost.forward_flops for cost in costs)
        if unit.action == "offload" and baseline.environment.device != "cpu":
            return None  # nobody has timed the way to the host
        left = unit_flops(baseline, graph, unit, children, policy)
        if left is None:
            return None
        share = left / flops if flops else float(unit.action != "offload")
        again += share * sum(cost.forward.median_ms or 0.0 for cost in costs)
    return 1 + again * without_hooks / step


def scale(baseline: Measurement) -> float | None:
    """What forward takes without hooks, over what it takes with those that time blocks; None: not both were timed."""
    root, times = baseline.by_fqn.get(""), baseline.times
    whole, hooked = times.forward.median_ms if times else None, root.forward.median_ms if root else None
    return whole / hooked if whole and hooked else None
