"""How much longer a step takes when units of it run again: their measured forward, less what early stop leaves out.

A block's forward is timed under light hooks and brought to the scale of the steps that were timed without them. What
early stop leaves out is taken by its share of the FLOPs; of nested units only the outermost is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from explorer.plan.forecast.rerun_flops import rerun_flops
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy


def time_ratio(
    baseline: Measurement, graph: ModelGraph | None, units: Iterable[Sequence[str]], policy: Policy
) -> float | None:
    """Step time over that of the measured `baseline`; None where that has no times."""
    root, times = baseline.by_fqn.get(""), baseline.times
    if root is None or times is None:
        return None
    step, whole, hooked = times.step.median_ms, times.forward.median_ms, root.forward.median_ms
    if not step or not whole or not hooked:
        return None
    again = 0.0
    for unit in units:
        bills = [baseline.by_fqn[fqn] for fqn in unit if fqn in baseline.by_fqn]
        flops = sum(bill.forward_flops for bill in bills)
        share = rerun_flops(baseline, graph, unit, policy) / flops if flops else 1.0
        again += share * sum(bill.forward.median_ms or 0.0 for bill in bills)
    return 1 + again * whole / hooked / step
