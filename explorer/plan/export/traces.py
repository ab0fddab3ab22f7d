"""A run's memory for other programs: a trace for Perfetto and chrome://tracing, and a profile for speedscope.

The trace has a process for each run: counters by role, phases and calls of blocks as slices, and an arrow from a
forward call to its recompute. The profile is what is alive at the peak, by block, role and operator.
Sources: "Trace Event Format" of the Chromium project, and speedscope's file-format-schema.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from explorer.errors import BadInput
from explorer.plan.memory.ledger import Bytes, alive, array_of, held, held_by_role, peak_tick
from explorer.record.allocations import ROLES, Allocations
from explorer.record.base import Record
from explorer.record.comparison import Comparison
from explorer.record.history import MemoryHistory
from explorer.record.measurement import Measurement, RecordedRanks

PHASES_LANE, FIRST_BLOCK_LANE = 1, 2
SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_SOURCE_LINE = re.compile(r"(?P<file>.+):(?P<line>\d+)(?: .*)?")
Event = dict[str, Any]


def runs_in(record: Record) -> dict[str, Measurement]:
    """The runs of a record that have a timeline, by name. Raises BadInput if there is none."""
    if isinstance(record, Comparison):
        runs = {"baseline": record.baseline, "candidate": record.candidate}
    elif isinstance(record, MemoryHistory):
        runs = record.by_device
    elif isinstance(record, RecordedRanks):
        runs = {f"rank {number}": run for number, run in record.by_rank.items()}
    else:
        runs = {"run": record} if isinstance(record, Measurement) else {}
    runs = {name: run for name, run in runs.items() if run.allocations is not None}
    if not runs:
        raise BadInput("This run has no memory timeline.", hint="Take a measurement, a comparison or a recorded step.")
    return runs


def perfetto(runs: Mapping[str, Measurement]) -> str:
    """The runs as JSON of Chrome's Trace Event Format, times in microseconds.

    A run without times, as a predicted one, has one microsecond for each event of the allocator.
    """
    events: list[Event] = []
    for process, (name, run) in enumerate(runs.items(), 1):
        log = run.allocations
        assert log is not None, "runs_in leaves out the others"
        scale = "" if len(log.time_ns) else ", 1 µs an allocator event"
        events.append(_metadata("process_name", process, 0, f"{name}{scale}"))
        times = times_us(log)
        events += ({**event, "pid": process} for event in (*_counters(run, log, times), *_phases(run, times)))
        events += ({**event, "pid": process} for event in _calls(run, log, times))
        events.append(_metadata("thread_name", process, PHASES_LANE, "phases"))
        lanes = {event["tid"] for event in events if event["pid"] == process and event.get("cat") == "block"}
        events += (_metadata("thread_name", process, lane, "blocks") for lane in sorted(lanes))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def speedscope(runs: Mapping[str, Measurement]) -> str:
    """What is alive at the peak of each run as JSON of speedscope, in bytes: a stack of blocks, a role, an operator."""
    frames: dict[str, int] = {}
    profiles = []
    for name, run in runs.items():
        assert run.allocations is not None, "runs_in leaves out the others"
        stacks, samples = _stacks_at_peak(run.allocations), []
        for stack in stacks:
            samples.append([frames.setdefault(part, len(frames)) for part in stack])
        profiles.append(
            {
                "type": "sampled",
                "name": f"{name}: alive at the peak",
                "unit": "bytes",
                "startValue": 0,
                "endValue": sum(stacks.values()),
                "samples": samples,
                "weights": list(stacks.values()),
            }
        )
    document = {
        "$schema": SCHEMA,
        "exporter": "checkpoint-explorer",
        "shared": {"frames": [_frame(name) for name in frames]},
        "profiles": profiles,
    }
    return json.dumps(document, separators=(",", ":"))


RUN_EXPORTS: dict[str, Callable[[Mapping[str, Measurement]], str]] = {
    ".perfetto.json": perfetto,
    ".speedscope.json": speedscope,
}
"""By the end of the file's name."""


def times_us(log: Allocations) -> list[float]:
    """Time of each tick 0..n_ticks and of the end, in microseconds."""
    times = array_of(log.time_ns) / 1000 if len(log.time_ns) else np.arange(log.n_ticks + 1, dtype=np.float64)
    ascending: list[float] = np.maximum.accumulate(times).tolist()
    return [*ascending, ascending[-1]]


def _metadata(what: str, process: int, lane: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": lane, "ts": 0, "args": {"name": name}}


def _counters(run: Measurement, log: Allocations, times: list[float]) -> Iterator[Event]:
    """A counter for each role that holds anything, the sum, and on a GPU what its allocator took."""
    curves: dict[str, Bytes] = {"bytes held": held(log)}
    curves |= {role: curve for role, curve in zip(ROLES, held_by_role(log)) if curve.any()}
    of_allocator = {"allocated": run.peaks.allocated, "reserved": run.peaks.reserved}
    curves |= {name: array_of(curve) for name, curve in of_allocator.items() if curve and len(curve) == log.n_ticks + 1}
    for name, curve in curves.items():
        for tick in (0, *(np.flatnonzero(np.diff(curve)) + 1).tolist()):
            yield {"ph": "C", "name": name, "tid": 0, "ts": times[tick], "args": {"bytes": int(curve[tick])}}


def _slice(name: str, kind: str, lane: int, times: list[float], ticks: tuple[int, int]) -> Event:
    first, end = (min(tick, len(times) - 1) for tick in ticks)
    return {"ph": "X", "cat": kind, "name": name, "tid": lane, "ts": times[first], "dur": times[end] - times[first]}


def _phases(run: Measurement, times: list[float]) -> Iterator[Event]:
    for span in run.phases:
        name = f"{span.phase} of {span.block}" if span.block else span.phase
        yield _slice(name, "phase", PHASES_LANE, times, (span.first_tick, span.end_tick))


def _calls(run: Measurement, log: Allocations, times: list[float]) -> Iterator[Event]:
    """A slice for each call of a block, in lanes where calls nest, and the arrows between them."""
    calls = log.calls
    ticks = list(zip(calls.first_tick, calls.end_tick))
    lanes: list[list[int]] = []
    """Of each lane, where its open calls end."""
    lane_of = []
    for number, (first, end) in enumerate(ticks):
        for ends in lanes:
            while ends and ends[-1] <= first:
                ends.pop()
        lane = next((i for i, ends in enumerate(lanes) if not ends or end <= ends[-1]), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(end)
        lane_of.append(lane)
        name = log.blocks[calls.block[number]] or "the model itself"
        yield _slice(name, "block", FIRST_BLOCK_LANE + lane, times, (first, end))
    for arrow, (number, first) in enumerate(recomputed_calls(run), 1):
        start = {"tid": FIRST_BLOCK_LANE + lane_of[number], "ts": times[ticks[number][0]]}
        for letter, where in (("s", start), ("f", {"tid": PHASES_LANE, "ts": times[first]})):
            yield {"ph": letter, "bp": "e", "cat": "recompute", "name": "recompute", "id": arrow, **where}


def recomputed_calls(run: Measurement) -> list[tuple[int, int]]:
    """(row of `Allocations.calls`, first tick of the recompute that repeats this call), in the order of the recomputes.

    Backward goes through the calls of a block from last to first, and so do its recomputes.
    """
    assert run.allocations is not None, "the caller's run has a timeline"
    waiting: dict[str, list[int]] = {}
    for number, block in enumerate(run.allocations.calls.block):
        waiting.setdefault(run.allocations.blocks[block], []).append(number)
    pairs = []
    for span in run.phases:
        if span.phase == "recompute" and waiting.get(span.block):
            pairs.append((waiting[span.block].pop(), span.first_tick))
    return pairs


def _stacks_at_peak(log: Allocations) -> dict[tuple[str, ...], int]:
    """Bytes alive at the peak by stack, the largest first."""
    sums: dict[tuple[int, int, int], int] = {}
    for entry in alive(log, peak_tick(log)).tolist():
        key = log.block[entry], log.role[entry], log.op[entry] if log.born[entry] else -1
        sums[key] = sums.get(key, 0) + log.n_bytes[entry]
    stacks: dict[tuple[str, ...], int] = {}
    for (block, role, op), n_bytes in sorted(sums.items(), key=lambda item: -item[1]):
        names = log.blocks[block].split(".") if log.blocks[block] else []
        path = [".".join(names[: i + 1]) for i in range(len(names))]
        operator = "made before the step" if op < 0 else log.ops[op] or "no operator"
        stack = ("the model itself", *path, ROLES[role], operator)
        stacks[stack] = stacks.get(stack, 0) + n_bytes
    return stacks


def _frame(name: str) -> Event:
    source = _SOURCE_LINE.fullmatch(name)
    return {"name": name} | ({"file": source["file"], "line": int(source["line"])} if source else {})
