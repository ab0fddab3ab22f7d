"""How much longer a step takes when units of it run again: their measured forward, less what early stop leaves out,
and what torch.utils.checkpoint itself takes a call and a saved tensor.

A block's forward is timed under light hooks and brought to the scale of the steps that were timed without them; see
rerun_ms.py for what of it runs again. A unit inside another runs again twice, with the outer one and on its own
account, unless the outer one's recompute ends where it is entered.

No unit's second forward takes exactly what its first took: it finds other memory and other caches. So a ratio comes
with an interval; whole steps that were measured draw it in, see calibrate.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from explorer.plan.forecast.rerun_ms import unit_ms
from explorer.record.graph import ModelGraph
from explorer.record.measurement import MeasuredBlock, Measurement, Times
from explorer.record.policy import Policy, Unit

CHECKPOINT_MS, SAVED_TENSOR_MS = 0.65, 0.015
"""What a checkpointed call takes beside its second forward, and for each tensor that it saves, where nobody measured
it: as AMONG_KERNELS; torch 2.13, a CPU core."""
SWEPT_IN_MS = 2.0
"""Milliseconds of a forward after which a checkpoint finds nothing of the last one in the caches: chosen on the
recurrent net, whose cells follow each other within one."""
N_SAVED = 16
"""Tensors that a call saves where nobody counted: as many as an attention layer or two convolutions with norms."""
RERUN_ERROR = 0.25
"""Standard deviation between models of what running again takes over what was foreseen.

`python -m benchmarks.step_time` says how many runs lie within the interval that comes of it."""
AGAIN, AMONG_KERNELS = 1.06, 1.35
"""How often a second forward takes what the first took, as it finds its input and its memory behind the caches; and how
often what a checkpoint itself takes, among the kernels of a model, what it took where it was measured alone. Least
squares over 87 policies of the eight sample models (benchmarks/README.md): 1.06, 0.60 ms a call, 0.016 ms a tensor."""
CALL_ERROR, KEPT_ERROR = 0.5, 1.0
"""As RERUN_ERROR, of what the checkpoints themselves take, and of units that keep results of operators."""
NINE_OF_TEN = 1.64
"""Standard errors on either side that hold nine of ten normal errors."""


class RerunTime(NamedTuple):
    """Step times over that of the baseline."""

    ratio: float
    spread: float
    """Half the width of the interval."""
    calls: float
    """The part of `ratio` that checkpoints take themselves."""


def time_ratio(
    baseline: Measurement, graph: ModelGraph | None, units: Mapping[Unit, Iterable[Unit]], policy: Policy
) -> RerunTime | None:
    """What a step takes beside the measured `baseline`; None where that has no times, or not those that it takes.

    `units`: those of `policy`, each with the units inside it.
    """
    step, scale = baseline.times.step.median_ms if baseline.times else None, rerun_scale(baseline)
    if not step or scale is None:
        return None
    again = overhead = unsure = 0.0
    for unit, within in units.items():
        ms = unit_ms(baseline, graph, unit, within, policy)
        if ms is None:
            return None
        again += ms
        own = overhead_ms(baseline, unit)
        overhead += own
        unsure += own * (KEPT_ERROR if unit.action == "save_ops" else CALL_ERROR)
    rerun, calls = again * scale / step, overhead / step
    ratio = 1 + rerun + calls
    error = math.hypot(RERUN_ERROR * rerun, unsure / step, ratio * _clock_error(baseline))
    return RerunTime(ratio, NINE_OF_TEN * error, calls)


def rerun_scale(baseline: Measurement) -> float | None:
    """What a second forward takes over a first as the hooks time it; None: no forward was timed with and without."""
    root, times = baseline.by_fqn.get(""), baseline.times
    whole, hooked = times.forward.median_ms if times else None, root.forward.median_ms if root else None
    return AGAIN * whole / hooked if whole and hooked else None


def overhead_ms(baseline: Measurement, unit: Unit) -> float:
    """What the checkpoints around `unit` take themselves in one step, and torch's look at its operators (save_ops)."""
    costs = [baseline.by_fqn[fqn] for fqn in unit.blocks if fqn in baseline.by_fqn]
    times = baseline.times or Times(clock="process CPU time")
    call_ms = CHECKPOINT_MS if times.checkpoint_ms is None else AMONG_KERNELS * times.checkpoint_ms
    if times.close_checkpoint_ms is not None and costs:
        close_ms = AMONG_KERNELS * times.close_checkpoint_ms
        call_ms = close_ms + _swept(times, costs[0]) * (call_ms - close_ms)
    saved_ms = SAVED_TENSOR_MS if times.saved_tensor_ms is None else AMONG_KERNELS * times.saved_tensor_ms
    n_saved = sum(N_SAVED * cost.n_forward if cost.n_saved is None else cost.n_saved for cost in costs)
    calls = (costs[0].n_forward if costs else 0) * call_ms + n_saved * saved_ms
    if unit.action != "save_ops":
        return calls
    look_ms = AMONG_KERNELS * (times.kept_operator_ms or 0.0)
    return calls + look_ms * sum(cost.n_operators or 0 for cost in costs)


def _swept(times: Times, cost: MeasuredBlock) -> float:
    """The part of the caches that is another's when a checkpoint begins: all, unless the block is called often."""
    gap_ms = (times.forward.median_ms or math.inf) / max(cost.n_forward, 1)
    return min(1.0, gap_ms / SWEPT_IN_MS)


def error_of_median(spread: float, n: int) -> float:
    """Standard error of the median of `n` normal readings of that spread."""
    return 1.25 * spread / math.sqrt(max(n, 1))


def _clock_error(baseline: Measurement) -> float:
    """Standard error of the step's median, as a share of it."""
    step = baseline.times.step if baseline.times else None
    if step is None or not step.median_ms or not step.spread_ms:
        return 0.0
    return error_of_median(step.spread_ms, len(step.ms)) / step.median_ms
