"""Positions of ticks on the x axis, for runs with different numbers of events.

A recomputed run has more allocator events than the plain run, so event n is a different moment in each run. On the
axis "tick" the drawn run keeps its event numbers. The other run is stretched: forward onto forward, backward
(recompute included) onto backward, optimizer onto optimizer.

    other   |--forward--|--------backward--------|opt|
    drawn   |--forward--|--bw--|recompute|--bw------|opt|     x = event of the drawn run

An optimizer that steps parameter by parameter has most of the events and little content. Its part is at most
OPTIMIZER_SHARE of the picture wide, and the axis says so.

On the axis "time" each phase is as long as in the timed steps, which run without recording. Recording slows small
operators most, so recorded times would draw a recomputed run too long. Within a phase, and without timed steps,
moments stand at their recorded times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from explorer.plan.memory.ledger import array_of
from explorer.record.allocations import Allocations, PhaseSpan
from explorer.record.measurement import Measurement

Axis = Literal["tick", "time"]
OPTIMIZER_SHARE = 1 / 6
Positions = NDArray[np.float64]


def positions(run: Measurement, log: Allocations, drawn: Measurement, *, axis: Axis) -> Positions:
    """x of each tick 0..n_ticks of `run` in a picture whose events are counted in `drawn`."""
    if axis == "time":
        return _timed(run, log)
    ticks = np.arange(log.n_ticks + 1, dtype=np.float64)
    x = ticks if run is drawn else _stretched(ticks, run, drawn)
    first, factor = narrowed_from(drawn)
    return np.where(x <= first, x, first + (x - first) * factor)


def _timed(run: Measurement, log: Allocations) -> Positions:
    """Milliseconds of each tick: every phase as long as its median, all together as long as the median step."""
    recorded = array_of(log.time_ns) / 1e6
    stretches = _borders(run.phases, log.n_ticks)
    medians = _phase_ms(run)
    if medians is None or not stretches or run.times is None:
        return recorded
    ends = recorded[[end for _, end in stretches]]
    lasted = np.diff(ends, prepend=0.0)
    of_phase: dict[str, float] = {}
    for (phase, _), ms in zip(stretches, lasted):
        of_phase[phase] = of_phase.get(phase, 0.0) + float(ms)
    faster = {phase: medians.get(phase, 0.0) / ms if ms else 0.0 for phase, ms in of_phase.items()}
    widths = np.array([ms * faster[phase] for (phase, _), ms in zip(stretches, lasted)])
    whole = widths.sum()
    if not whole:
        return recorded
    borders = np.cumsum(widths) * ((run.times.step.median_ms or whole) / whole)
    return np.asarray(np.interp(recorded, [0.0, *ends], [0.0, *borders]), dtype=np.float64)


def _phase_ms(run: Measurement) -> dict[str, float] | None:
    """Median of each phase in the timed steps, recompute in backward; None: not timed."""
    if run.times is None:
        return None
    measured = {
        "forward": run.times.forward.median_ms,
        "backward": run.times.backward.median_ms,
        "optimizer": run.times.optimizer.median_ms,
    }
    medians = {phase: ms for phase, ms in measured.items() if ms is not None}
    return medians if len(medians) == len(measured) else None


def event_ticks(run: Measurement) -> tuple[list[float], list[str]]:
    """Places and labels of round event numbers on the axis "tick" of a picture of `run`."""
    log = run.allocations
    n = log.n_ticks if log else 0
    first, factor = narrowed_from(run)
    step = 10 ** math.floor(math.log10(max(first, 1)))
    step = next(size for size in (step // 5, step // 2, step, 2 * step) if size and first / size <= 6)
    places = [float(x) for x in range(0, first + 1, step)]
    labels = [f"{x:,.0f}" for x in places]
    if n > first:
        places, labels = [*places, first + (n - first) * factor], [*labels, f"{n:,}"]
    return places, labels


def narrowed_from(run: Measurement) -> tuple[int, float]:
    """The last event before the optimizer's stretch, and the factor that the stretch is narrowed by."""
    n = run.allocations.n_ticks if run.allocations else 0
    span = run.phases[-1] if run.phases else None
    if span is None or span.phase != "optimizer" or span.first_tick < 2:
        return n, 1.0
    before = span.first_tick - 1
    wide = before * OPTIMIZER_SHARE / (1 - OPTIMIZER_SHARE)
    return before, min(1.0, wide / max(n - before, 1))


def _stretched(ticks: Positions, run: Measurement, drawn: Measurement) -> Positions:
    """Event numbers of `run` as event numbers of `drawn`, phase onto phase."""
    log = run.allocations
    if log is None or drawn.allocations is None:
        return ticks
    source, onto = _borders(run.phases, log.n_ticks), _borders(drawn.phases, drawn.allocations.n_ticks)
    shared = 0
    while shared < min(len(source), len(onto)) and source[shared][0] == onto[shared][0]:
        shared += 1
    if not shared:
        return ticks * (drawn.allocations.n_ticks / max(log.n_ticks, 1))
    whole = shared == len(source) == len(onto)
    # A run that was cut short is stretched as far as it went; behind the last common border events count as they are.
    tail = (log.n_ticks - source[shared - 1][1]) if not whole else 0
    x_own = [0, *(end for _, end in source[:shared]), log.n_ticks]
    x_onto = [0, *(end for _, end in onto[:shared]), onto[shared - 1][1] + tail]
    return np.asarray(np.interp(ticks, x_own, x_onto), dtype=np.float64)


def has_times(*runs: Measurement | None) -> bool:
    """Whether each run present has measured times of every tick; predicted runs have simulated times."""
    there = [(run, run.allocations) for run in runs if run is not None and run.allocations is not None]
    return bool(there) and all(run.origin != "predicted" and len(log.time_ns) == log.n_ticks + 1 for run, log in there)


def axis_layout(axis: Axis, drawn: Measurement, *, of: str = "") -> dict[str, object]:
    """Layout of the x axis: its unit, and its ticks at round numbers. `of`: words for the run."""
    hover = {"text": "%{x:.1f} ms" if axis == "time" else " "}  # a place on a narrowed axis is no event
    if axis == "time":
        timed = _phase_ms(drawn) is not None
        return {
            "title_text": "time (ms)" if timed else "time, recording included (ms)",
            "unifiedhovertitle": hover,
        }
    places, labels = event_ticks(drawn)
    narrow = ", optimizer narrowed" if narrowed_from(drawn)[1] < 1 else ""
    return {
        "title_text": f"allocations and frees in order{of}{narrow}",
        "tickvals": places,
        "ticktext": labels,
        "unifiedhovertitle": hover,
    }


def _borders(phases: tuple[PhaseSpan, ...], n_ticks: int) -> list[tuple[str, int]]:
    """(phase, last tick) of each stretch, recompute counted as the backward it serves."""
    stretches: list[tuple[str, int]] = []
    for span in phases:
        phase = "backward" if span.phase == "recompute" else span.phase
        end = min(span.end_tick - 1, n_ticks)
        if stretches and stretches[-1][0] == phase:
            stretches[-1] = (phase, end)
        else:
            stretches.append((phase, end))
    return stretches


Indices = NDArray[np.intp]

MAX_POINTS = 2000
"""Points per drawn trace that a browser redraws at once."""


def minmax(values: NDArray[Any], n_points: int = MAX_POINTS) -> Indices:
    """Ascending indices of at most `n_points` (4 or more) of `values`: first, last, and the extremes of each bucket.

    Among equal values the first of a bucket is kept, so the first tick of the peak survives.

    >>> minmax(np.array([0, 9, 0, 0, 0, 0, 7, 0]), 6).tolist()
    [0, 1, 2, 4, 6, 7]
    """
    n = len(values)
    if n <= n_points:
        return np.arange(n)
    n_buckets = (n_points - 2) // 2
    edges = np.linspace(0, n, n_buckets + 1).astype(np.intp)
    width = int(np.diff(edges).max())
    # Equal rows: a short bucket repeats its last point, which moves neither its extremes nor their first place.
    grid = np.minimum(edges[:-1, None] + np.arange(width), edges[1:, None] - 1)
    rows = values[grid]
    here = np.arange(n_buckets)
    lowest = grid[here, rows.argmin(axis=1)]
    highest = grid[here, rows.argmax(axis=1)]
    return np.unique(np.concatenate([[0], lowest, highest, [n - 1]]))


def with_points(indices: Indices, extra: Iterable[int], n: int) -> Indices:
    """`indices` and the values of `extra` in 0..n-1, ascending, without duplicates."""
    inside = np.fromiter((i for i in extra if 0 <= i < n), dtype=np.intp)
    return np.union1d(indices, inside)
