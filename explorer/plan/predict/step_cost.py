"""The cost of running units again: FLOPs, milliseconds, and how much longer a step takes.

FLOPs       A rerun ends at the last tensor that is saved (`early_stop`, non-reentrant only). A block that ends in a
            matrix product whose result only others keep does not run that product again. A unit that ends in another
            unit stops where that unit is entered. A segment stops in its last block that saves a tensor. A unit that
            saves none never runs again.
time        The measured forward of a unit, less the operators that the rerun leaves out. Operators that were timed one
            by one give their share of the block's time. Otherwise early stop is taken by its share of the FLOPs.
step        The reruns, and what torch.utils.checkpoint itself takes a call and a saved tensor. A unit inside another
            runs again twice: with the outer unit, and for its own backward.
calibration All blocks of a model are off alike, because a second forward finds other memory and other caches. Steps
            that were timed whole, in turns with everything kept, correct the prediction and narrow its interval.
siblings    Equal siblings take the mean of their times: the times differ by noise alone.

Source: https://docs.pytorch.org/docs/stable/checkpoint.html"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from statistics import fmean
from typing import NamedTuple

from msgspec.structs import replace

from explorer.plan.names import Fqns, is_within
from explorer.record.graph import Block, ModelGraph
from explorer.record.measurement import MeasuredBlock, Measurement, Samples, Times
from explorer.record.plan import Forecast
from explorer.record.policy import Policy, Unit


def run_again(graph: ModelGraph | None, blocks: Fqns, policy: Policy) -> Fqns:
    """The blocks of a unit whose forward runs again at least in part; all blocks without the `graph`."""
    if graph is None or policy.use_reentrant:
        return blocks
    n_saving = max((n for n, fqn in enumerate(blocks, start=1) if fqn not in graph.saves_nothing), default=0)
    return blocks[:n_saving] if policy.stops_early or not n_saving else blocks


def costs_of(run: Measurement, blocks: Iterable[str]) -> list[MeasuredBlock]:
    """What each block cost; blocks that were not measured are left out."""
    return [run.by_fqn[fqn] for fqn in blocks if fqn in run.by_fqn]


def _last_block(graph: ModelGraph | None, blocks: Fqns) -> Block | None:
    return graph.by_fqn.get(blocks[-1]) if graph is not None and blocks else None


def rerun_flops(measurement: Measurement, graph: ModelGraph | None, unit: Fqns, policy: Policy) -> int:
    """FLOPs of a rerun of `unit`; the whole forward without the `graph`, which knows the last saved tensor."""
    blocks = run_again(graph, unit, policy)
    costs = costs_of(measurement, blocks)
    total = sum(cost.forward_flops for cost in costs)
    last = _last_block(graph, blocks)
    if last is None or not costs or not last.forward_flops or not policy.stops_early:
        return total
    return total - round(costs[-1].forward_flops * (1 - last.rerun_flops / last.forward_flops))


def unit_flops(
    measurement: Measurement, graph: ModelGraph | None, unit: Unit, inside: Iterable[Unit], policy: Policy
) -> int | None:
    """FLOPs of a rerun of `unit`, without the part that reruns of the units `inside` repeat for themselves.

    None if the unit keeps results of operators whose FLOPs were not counted.
    """
    if unit.action == "save_ops":
        flops_of_results = _kept_flops(measurement, graph, unit, policy)
        if flops_of_results is None:
            return None
        return rerun_flops(measurement, graph, unit.blocks, policy) - flops_of_results
    until_saved = _flops_until_saved(measurement, graph, unit, inside := tuple(inside), policy)
    return max(until_saved, _flops_until_entered(measurement, graph, unit, inside, policy))


def _flops_until_saved(
    measurement: Measurement, graph: ModelGraph | None, unit: Unit, inside: Iterable[Unit], policy: Policy
) -> int:
    """FLOPs of a rerun of `unit` until it has saved its last tensor, or has entered the unit inside that saves it."""
    again = rerun_flops(measurement, graph, unit.blocks, policy)
    stop = _stop_of(graph, unit, inside, policy)
    if stop is None:
        return again
    return again - round(rerun_flops(measurement, graph, stop.blocks, policy) * _calls_within(measurement, unit, stop))


def _flops_until_entered(
    measurement: Measurement, graph: ModelGraph | None, unit: Unit, inside: Iterable[Unit], policy: Policy
) -> int:
    """FLOPs of a rerun of `unit` until the last of the units `inside` is entered, whether that one saves or not.

    A checkpoint saves its inputs, so the rerun goes on until it has entered the last one. 0 if it is not known, and if
    no rerun takes place because `unit` saves nothing.
    """
    if graph is None or policy.use_reentrant or not run_again(graph, unit.blocks, policy):
        return 0
    if not all(fqn in graph.by_fqn for fqn in unit.blocks):
        return 0
    first = graph.by_fqn[unit.blocks[0]]
    counted = sum(graph.by_fqn[fqn].forward_flops for fqn in unit.blocks)
    entered = [graph.by_fqn[child.blocks[0]].flops_before for child in inside if child.blocks[0] in graph.by_fqn]
    if first.flops_before is None or not counted:
        return 0
    ran = sum(cost.forward_flops for cost in costs_of(measurement, unit.blocks))
    most = max((flops - first.flops_before for flops in entered if flops is not None), default=0)
    return round(ran * first.n_calls * max(most, 0) / counted)


def _kept_flops(measurement: Measurement, graph: ModelGraph | None, unit: Unit, policy: Policy) -> int | None:
    """FLOPs that a rerun of `unit` avoids because it keeps results of operators; None if they were not counted."""
    flops, blocks = 0, run_again(graph, unit.blocks, policy)
    for fqn in blocks:
        block, cost = _last_block(graph, (fqn,)), measurement.by_fqn.get(fqn)
        if block is None or cost is None or (block.forward_flops and not block.op_flops):
            return None
        ran = Counter(block.op_flops)
        if policy.stops_early and fqn == blocks[-1]:
            ran.subtract(block.late_op_flops)
        if share := sum(ran[op] for op in set(unit.save_ops)):
            flops += round(cost.forward_flops * share / block.forward_flops)
    return flops


def stops_in(graph: ModelGraph | None, unit: Unit) -> str:
    """The block in which `unit` saves its last tensor, where a rerun stops; the empty string: unknown."""
    last = _last_block(graph, run_again(graph, unit.blocks, Policy()))
    return "" if last is None else last.last_saved_in


def stops_inside(graph: ModelGraph | None, unit: Unit, child: Unit) -> bool:
    """True if the last tensor that `unit` saves is saved in its inner unit `child`."""
    stop = stops_in(graph, unit)
    return bool(stop) and is_within(stop, *child.blocks)


def _stop_of(graph: ModelGraph | None, unit: Unit, inside: Iterable[Unit], policy: Policy) -> Unit | None:
    """The unit of `inside` in which a rerun of `unit` stops; None if it stops elsewhere."""
    if not policy.stops_early:
        return None
    return next((child for child in inside if stops_inside(graph, unit, child)), None)


def _calls_within(measurement: Measurement, unit: Unit, child: Unit) -> float:
    """Calls of `unit` for each call of its inner unit `child`."""
    outer, inner = (measurement.by_fqn.get(blocks[-1]) for blocks in (unit.blocks, child.blocks))
    return outer.n_forward / inner.n_forward if outer and inner and inner.n_forward else 1


def unit_ms(
    measurement: Measurement, graph: ModelGraph | None, unit: Unit, inside: Iterable[Unit], policy: Policy
) -> float | None:
    """Milliseconds of a rerun of `unit` on the clock of the block hooks, without the part in the units `inside`.

    None if the unit keeps results of operators, and the operators or torch's look at them were not timed.
    """
    if unit.save_ops and (measurement.times is None or measurement.times.kept_operator_ms is None):
        return None
    again, blocks = 0.0, run_again(graph, unit.blocks, policy)
    for fqn in blocks:
        cost = measurement.by_fqn.get(fqn)
        if cost is None:
            continue
        last = _last_block(graph, blocks) if policy.stops_early and fqn == blocks[-1] else None
        share = rerun_share(cost, last, save_ops=unit.save_ops)
        if share is None:
            return None
        again += share * (cost.forward.median_ms or 0.0)
    stop = _stop_of(graph, unit, inside := tuple(inside), policy)
    if stop is not None:
        entered = Unit(blocks=stop.blocks)  # this rerun would also have run the operators that the unit inside keeps
        stop_ms = unit_ms(measurement, graph, entered, (), policy) or 0.0
        again -= _calls_within(measurement, unit, stop) * stop_ms
    return again + _ms_until_entered(measurement, graph, unit, inside, policy)


def _ms_until_entered(
    measurement: Measurement, graph: ModelGraph | None, unit: Unit, inside: Iterable[Unit], policy: Policy
) -> float:
    """Milliseconds between the last saved tensor and the entry of the last of the units `inside`, by their FLOPs."""
    inside = tuple(inside)
    entered = _flops_until_entered(measurement, graph, unit, inside, policy)
    more = entered - _flops_until_saved(measurement, graph, unit, inside, policy) if entered else 0
    costs = costs_of(measurement, unit.blocks)
    flops = sum(cost.forward_flops for cost in costs)
    if more <= 0 or not flops:
        return 0.0
    return more / flops * sum(cost.forward.median_ms or 0.0 for cost in costs)


def rerun_share(cost: MeasuredBlock, stops_in: Block | None, *, save_ops: Collection[str] = ()) -> float | None:
    """The share of a block's forward that runs again; only up to its last saved tensor if the rerun `stops_in` it.

    None if results of `save_ops` are kept, and the operators of the block were not timed.
    """
    if stops_in is None and not save_ops:
        return 1.0
    if not cost.operator_ms:
        if save_ops:
            return None
        return stops_in.rerun_flops / stops_in.forward_flops if stops_in and stops_in.forward_flops else 1.0
    again = 0.0
    for op, ms in cost.operator_ms.items():
        if op in save_ops:
            continue
        if stops_in is not None and (late_flops := stops_in.late_op_flops.get(op)):
            ms *= 1 - late_flops / stops_in.op_flops[op]
        again += ms
    return again / sum(cost.operator_ms.values())


CHECKPOINT_MS, SAVED_TENSOR_MS = 0.65, 0.015
"""Milliseconds of a checkpointed call beside its second forward, and for each tensor that the call saves.

Defaults if neither was measured; source as AMONG_KERNELS; torch 2.13, a CPU core."""
COLD_AFTER_MS = 2.0
"""Milliseconds of forward after which the caches hold nothing of the last checkpoint. The value is chosen on the
recurrent net, whose cells follow each other within less than that time."""
N_SAVED = 16
"""Tensors saved by a call that was not counted: as many as an attention layer or two convolutions with norms save."""
RERUN_ERROR = 0.25
"""Standard deviation between models of the measured rerun time over the predicted one.

`python -m benchmarks.step_time` counts the runs within the interval that follows."""
AGAIN, AMONG_KERNELS = 1.06, 1.35
"""Time of a second forward over the first, because its input and memory are out of the caches; and overhead of a
checkpoint between the kernels of a model over its overhead measured alone. Least squares over 87 policies of the eight
sample models (benchmarks/README.md): 1.06, 0.60 ms a call, 0.016 ms a tensor."""
CALL_ERROR, KEPT_ERROR = 0.5, 1.0
"""Standard deviations as RERUN_ERROR: of checkpoint overhead, and of overhead of units that keep operator results."""
NINE_OF_TEN = 1.64
"""Standard errors on either side that contain nine of ten normal errors."""


class RerunTime(NamedTuple):
    """A step time over the step time of the baseline."""

    ratio: float
    spread: float
    """Half the width of the interval."""
    calls: float
    """The part of `ratio` that is overhead of checkpoints."""


def time_ratio(
    baseline: Measurement, graph: ModelGraph | None, units: Mapping[Unit, Iterable[Unit]], policy: Policy
) -> RerunTime | None:
    """The step time under `policy` over that of `baseline`; None if the baseline lacks a time that is needed.

    `units`: the units of `policy`, each with the units inside it.
    """
    times, scale = baseline.times, rerun_scale(baseline)
    if times is None or scale is None or not (step := times.step.median_ms):
        return None
    again = overhead = unsure = 0.0
    for unit, within in units.items():
        ms, calls_ms = unit_ms(baseline, graph, unit, within, policy), overhead_ms(baseline, unit)
        if ms is None:
            return None
        again += ms
        overhead += calls_ms
        unsure += calls_ms * (KEPT_ERROR if unit.action == "save_ops" else CALL_ERROR)
    rerun, calls = again * scale / step, overhead / step
    ratio = 1 + rerun + calls
    clock_error = error_of_median(times.step.spread_ms or 0.0, len(times.step.ms)) / step
    error = math.hypot(RERUN_ERROR * rerun, unsure / step, ratio * clock_error)
    return RerunTime(ratio, NINE_OF_TEN * error, calls)


def rerun_scale(baseline: Measurement) -> float | None:
    """The time of a second forward over the first forward as hooks time it; None if forward was not timed both ways."""
    root, times = baseline.by_fqn.get(""), baseline.times
    if root is None or times is None:
        return None
    whole, hooked = times.forward.median_ms, root.forward.median_ms
    return AGAIN * whole / hooked if whole and hooked else None


def overhead_ms(baseline: Measurement, unit: Unit) -> float:
    """Milliseconds per step of overhead of the checkpoints of `unit`, and of torch's look at operators (save_ops)."""
    costs = costs_of(baseline, unit.blocks)
    if not costs:
        return 0.0
    times = baseline.times or Times(clock="process CPU time")
    call_ms, saved_ms = CHECKPOINT_MS, SAVED_TENSOR_MS
    if times.saved_tensor_ms is not None:
        saved_ms = AMONG_KERNELS * times.saved_tensor_ms
    if times.checkpoint_ms is not None:
        call_ms = AMONG_KERNELS * times.checkpoint_ms
    if times.close_checkpoint_ms is not None:
        close_ms = AMONG_KERNELS * times.close_checkpoint_ms
        gap_ms = (times.forward.median_ms or math.inf) / max(costs[0].n_forward, 1)
        # The share of the caches that holds other data when a checkpoint begins: 1, unless the block is called often.
        call_ms = close_ms + min(1.0, gap_ms / COLD_AFTER_MS) * (call_ms - close_ms)
    n_saved = sum(N_SAVED * cost.n_forward if cost.n_saved is None else cost.n_saved for cost in costs)
    calls = costs[0].n_forward * call_ms + n_saved * saved_ms
    if unit.action != "save_ops":
        return calls
    look_ms = AMONG_KERNELS * (times.kept_operator_ms or 0.0)
    return calls + look_ms * sum(cost.n_operators or 0 for cost in costs)


def error_of_median(spread: float, n: int) -> float:
    """Standard error of the median of `n` normal readings with standard deviation `spread`."""
    return 1.25 * spread / math.sqrt(max(n, 1))


LEFT_ERROR = 0.1
"""Standard error that remains between policies of one model, as a share of the rerun time."""


class TimedStep(NamedTuple):
    """Step time of a policy over the baseline's: predicted from the baseline alone, and measured in turns with it."""

    predicted: float
    measured: float
    error: float
    """Standard error of `measured`."""
    calls: float = 0.0
    """The part of `predicted` that is overhead of checkpoints."""


def calibrated(forecast: Forecast, steps: Iterable[TimedStep]) -> Forecast:
    """`forecast` with its rerun time scaled by the ratio of measured to predicted rerun time in `steps`."""
    ratio = forecast.time_ratio
    slower = [step for step in steps if step.predicted > 1]
    if ratio is None or not slower:
        return forecast
    factors = [(step.measured - 1) / (step.predicted - 1) for step in slower]
    counts = [1 / ((step.error / (step.predicted - 1)) ** 2 + LEFT_ERROR**2) for step in slower]
    weight = sum(counts) + RERUN_ERROR**-2
    factor = max(0.0, (sum(count * times for count, times in zip(counts, factors)) + RERUN_ERROR**-2) / weight)
    apart = max(LEFT_ERROR * factor, statistics.stdev(factors) if len(factors) > 1 else 0.0)
    calls_seen = statistics.mean(step.calls / (step.predicted - 1) for step in slower)
    more_calls = CALL_ERROR * ((forecast.time_ratio_of_calls or 0.0) - (ratio - 1) * calls_seen)
    clock = statistics.mean(step.error for step in slower)
    error = math.hypot(clock, (ratio - 1) * math.hypot(apart, weight**-0.5), more_calls)
    return replace(forecast, time_ratio=1 + (ratio - 1) * factor, time_ratio_spread=NINE_OF_TEN * error)


def kin_of(graph: ModelGraph, fqn: str) -> str:
    """`fqn` with the numbers of repeated blocks replaced by the number of the first repeat, and its FLOPs."""
    parts = fqn.split(".")
    for n in range(1, len(parts) + 1):
        block = graph.by_fqn.get(".".join(parts[:n]))
        if block is not None and block.repeat_of is not None:
            parts[:n] = block.repeat_of.split(".")
    block = graph.by_fqn.get(fqn)
    return f"{'.'.join(parts)} {block.forward_flops if block else 0}"


def with_equal_times(measurement: Measurement, graph: ModelGraph) -> Measurement:
    """`measurement` with the forward time of each timed block replaced by the mean of its equal siblings."""
    kin: dict[str, list[MeasuredBlock]] = defaultdict(list)
    for cost in measurement.blocks:
        if cost.fqn in graph.by_fqn and cost.forward.median_ms is not None:
            kin[kin_of(graph, cost.fqn)].append(cost)
    means = ((equal, _mean(equal)) for equal in kin.values() if len(equal) > 1)
    times = {block.fqn: mean for equal, mean in means for block in equal}
    blocks = tuple(replace(cost, **times[cost.fqn]) if cost.fqn in times else cost for cost in measurement.blocks)
    return replace(measurement, blocks=blocks)


def _mean(equal: list[MeasuredBlock]) -> dict[str, object]:
    tables = [block.operator_ms for block in equal]
    ops = {op for table in tables for op in table} if all(tables) else ()
    return {
        "forward": Samples(ms=(fmean(block.forward.median_ms or 0.0 for block in equal),)),
        "operator_ms": {op: fmean(table.get(op, 0.0) for table in tables) for op in sorted(ops)},
    }
