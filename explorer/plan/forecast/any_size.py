"""The step at a batch, or a length, that nobody ran: a few small runs tell it to the byte.

Two runs that differ in one size alone make the same tensors in the same order, as long as no shape depends on the data.
Each tensor's bytes are then a polynomial of that size: of degree one for a batch, so that two runs tell all; of degree
two for a sequence length where attention is not fused, so that three do. The peak at another size is the highest point
of the timeline made of the tensors' sizes there, not a line through the peaks: another tick may be the highest.

Where the runs do not agree event by event (shapes that depend on the data, another kernel at another size) a polynomial
through their peaks is all there is: `Sized.event_by_event` says which it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import msgspec
import numpy as np

from explorer.errors import BadInput
from explorer.plan.forecast.block_bytes import with_bytes
from explorer.plan.memory.ledger import Bytes, array_of
from explorer.record.allocations import Allocations
from explorer.record.base import Column
from explorer.record.measurement import AllocatorPeaks, MeasuredBlock, Measurement, Samples
from explorer.record.run import RunSpec

_SAME = ("n_ticks", "born", "died", "role", "block", "op", "blocks", "ops", "calls", "weight_casts")
_FLOPS = ("forward_flops", "recompute_flops", "backward_flops", "skipped_flops")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """What a step needs at one size. Origin: predicted."""

    size: int
    step_peak_bytes: int
    event_by_event: bool
    """True: the timeline is known to the byte. False: a polynomial through the measured peaks, which is rougher."""
    measurement: Measurement | None
    """The whole timeline, where the runs agree event by event: any policy can be forecast from it."""


def at_size(runs: Mapping[int, Measurement], size: int, spec: RunSpec) -> Sized:
    """The step of `spec` at `size`, from finished runs by their sizes: two for a batch, three for a length.

    Raises BadInput for fewer than two runs, or runs without a timeline.
    """
    sizes = sorted(runs)
    logs = [runs[measured].allocations for measured in sizes]
    known = [log for log in logs if log is not None]
    if len(sizes) < 2 or len(known) < len(sizes) or any(run.failure is not None for run in runs.values()):
        raise BadInput(
            f"A step at size {size} is foreseen from two finished runs or more, found {len(known)}.",
            hint="Measure the step at two small sizes first, such as batch 2 and batch 4.",
        )
    weights = _weights(sizes, size)
    if not _agree(known):
        peaks = [max(log.held_bytes) for log in known]
        return Sized(size=size, step_peak_bytes=_at(weights, peaks), event_by_event=False, measurement=None)
    log = msgspec.structs.replace(known[0], n_bytes=_sizes_at(weights, known), time_ns=Column("q"))
    told = _told([runs[measured] for measured in sizes], weights, log, spec)
    return Sized(size=size, step_peak_bytes=max(log.held_bytes), event_by_event=True, measurement=told)


def largest(fits: Callable[[int], bool], *, most: int = 2**20) -> int:
    """The largest size up to `most` that `fits`, 0: not even 1; `fits` is true up to some size and false behind it."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _weights(sizes: list[int], size: int) -> list[Fraction]:
    """What each run counts for at `size`: Lagrange's polynomials, exact."""
    weights = []
    for own in sizes:
        weight = Fraction(1)
        for other in sizes:
            if other != own:
                weight *= Fraction(size - other, own - other)
        weights.append(weight)
    return weights


def _at(weights: list[Fraction], values: list[int]) -> int:
    return max(0, round(sum(weight * value for weight, value in zip(weights, values))))


def _agree(logs: list[Allocations]) -> bool:
    """Whether all runs made and freed the same tensors in the same order."""
    return all(getattr(log, name) == getattr(logs[0], name) for log in logs[1:] for name in _SAME)


def _sizes_at(weights: list[Fraction], logs: list[Allocations]) -> Column:
    """Bytes of each entry at the wanted size. Entries of equal sizes in every run share one sum."""
    rows = np.stack([array_of(log.n_bytes) for log in logs])
    kinds, which = np.unique(rows, axis=1, return_inverse=True)
    there = np.array([_at(weights, kind.tolist()) for kind in kinds.T], dtype=np.int64)
    sizes: Bytes = there[which.reshape(-1)]
    return Column("q", sizes.tobytes())


def _told(runs: list[Measurement], weights: list[Fraction], log: Allocations, spec: RunSpec) -> Measurement:
    def counted(rows: tuple[MeasuredBlock, ...]) -> MeasuredBlock:
        flops = {name: _at(weights, [getattr(row, name) for row in rows]) for name in _FLOPS}
        return msgspec.structs.replace(rows[0], forward=Samples(), recompute=Samples(), **flops)

    told = msgspec.structs.replace(
        runs[0],
        spec=spec,
        origin="predicted",
        allocations=log,
        peaks=AllocatorPeaks(),
        times=None,
        loss=None,
        warnings=(),
    )
    costs = [counted(rows) for rows in zip(*(run.blocks for run in runs))]
    return msgspec.structs.replace(told, blocks=with_bytes(told, costs))
