"""The timeline's entries without names: the allocator's blocks of one step, each with the storage in the block.

Steps 1 to 4 of attribution.py: cut the record to the step, join blocks and storages, add earlier memory, and
number the events that change the total.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, replace

import numpy as np

from explorer.engine.device.allocator import AllocatorLog, Ints, Lifetimes
from explorer.engine.measure.tracked import TrackedStep, as_ints
from explorer.engine.watch.storages import NONE

SLACK_NS = 1_000
"""Disagreement of two clocks of one machine after correction of their skew. The allocator's grain is added."""


@dataclass(frozen=True)
class _Older:
    """Entries from before the step. `died` is an event of the log, its length for never, or beyond for `extra_ns`."""

    n_bytes: Ints
    died: Ints
    storage: Ints
    extra_ns: Ints
    """Deaths that the allocator does not report, on its clock."""


@dataclass(frozen=True)
class Entries:
    """Columns of the timeline under construction; `born` and `died` are ticks."""

    n_bytes: Ints
    born: Ints
    died: Ints
    storage: Ints
    """The tracker's number, or NONE."""
    time_ns: Ints
    """Time of the allocation, on the tracker's clock."""
    events: Ints
    """The log's events that have a tick, in order of ticks."""


def window(log: AllocatorLog, first_ns: int, last_ns: int) -> AllocatorLog:
    """The events of the step. Events between the start of the recording and the step go into the base."""
    first, end = (int(i) for i in np.searchsorted(log.time_ns, (first_ns, last_ns)))
    before = int(log.n_bytes[:first].sum())
    return replace(
        log,
        time_ns=log.time_ns[first:end],
        pointer=log.pointer[first:end],
        n_bytes=log.n_bytes[first:end],
        base_bytes=None if log.base_bytes is None else log.base_bytes + before,
        allocated=None if log.allocated is None else log.allocated[first : end + 1],
        reserved=None if log.reserved is None else log.reserved[first : end + 1],
    )


def _join(log: AllocatorLog, lived: Lifetimes, tracked: TrackedStep, skew_ns: int) -> Ints:
    """The storage that lived in each allocated block, or NONE.

    A storage's block has the same pointer and size, and is the last such block allocated before the storage was seen.
    Blocks and storages come in order of time, so each pointer's two lists are merged once.
    """
    storage_of_block = np.full(len(lived.born), NONE, dtype=np.int64)
    places = zip(log.pointer[lived.born].tolist(), log.n_bytes[lived.born].tolist())
    candidates: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    for i, place in enumerate(places):
        candidates[place].append(i)
    slack_ns = SLACK_NS + log.clock_grain_ns
    ends_ns = np.append(log.time_ns, np.iinfo(np.int64).max)
    born_ns, died_ns = log.time_ns[lived.born].tolist(), ends_ns[lived.died].tolist()
    seen = zip(tracked.pointer.tolist(), tracked.n_bytes.tolist(), (tracked.seen_ns + skew_ns).tolist())
    for number, (pointer, n_bytes, seen_ns) in enumerate(seen):
        waiting = candidates.get((pointer, n_bytes))
        if number < tracked.n_before_step or not waiting:
            continue
        # Blocks allocated before this storage was seen are past for all later storages too, and are popped.
        chosen = NONE
        while waiting and born_ns[waiting[0]] <= seen_ns + slack_ns:
            chosen = waiting.popleft()
        # A block freed before the storage was seen held other memory, of a kernel for example.
        if chosen != NONE and died_ns[chosen] >= seen_ns - slack_ns:
            storage_of_block[chosen] = number
    return storage_of_block


def _older(log: AllocatorLog, lived: Lifetimes, tracked: TrackedStep, skew_ns: int) -> _Older:
    """Entries from before the step, and the events that end the entries.

    CUDA reports the frees. The CPU's profiler does not, so the tracker's deaths of storages are used.
    """
    known = slice(0, tracked.n_before_step)
    end = len(log.time_ns)
    n_bytes, died = tracked.n_bytes[known].tolist(), [end] * tracked.n_before_step
    storage = list(range(tracked.n_before_step))
    if log.base_bytes is None:
        gone = np.flatnonzero(tracked.died_ns[known] != NONE)
        for i, number in enumerate(gone.tolist()):
            died[number] = end + 1 + i
        return _Older(as_ints(n_bytes), as_ints(died), as_ints(storage), tracked.died_ns[known][gone] + skew_ns)
    number_at = {pointer: i for i, pointer in enumerate(tracked.pointer[known].tolist())}
    frees = lived.older_frees
    for event, pointer, size in zip(frees.tolist(), log.pointer[frees].tolist(), (-log.n_bytes[frees]).tolist()):
        number = number_at.pop(pointer, NONE)
        if number != NONE and n_bytes[number] == size:
            died[number] = event
        else:
            n_bytes.append(size)
            died.append(event)
            storage.append(NONE)
    # The rest of CUDA's base belongs to no tensor of the model: cuBLAS's workspace, other models of the process.
    rest = log.base_bytes - sum(n_bytes)
    if rest > 0:
        n_bytes.append(rest)
        died.append(end)
        storage.append(NONE)
    return _Older(as_ints(n_bytes), as_ints(died), as_ints(storage), np.zeros(0, dtype=np.int64))


def entries_of(log: AllocatorLog, lived: Lifetimes, tracked: TrackedStep, skew_ns: int) -> tuple[Entries, Ints]:
    """The columns, and the time of each tick from 1 on, on the tracker's clock.

    Events of the log are numbered 0..n-1 and n is "never". Deaths seen by the tracker alone are numbered from n + 1.
    """
    n_events = len(log.time_ns)
    older = _older(log, lived, tracked, skew_ns)
    counts = np.zeros(n_events + 1 + len(older.extra_ns), dtype=bool)
    counts[lived.born] = counts[lived.died] = counts[older.died] = True
    counts[n_events] = False
    event_ns = np.concatenate((log.time_ns, [0], older.extra_ns)).astype(np.int64)
    events = np.flatnonzero(counts)
    in_time = events[np.argsort(event_ns[events], kind="stable")]
    tick = np.full(len(counts), len(in_time) + 1, dtype=np.int64)
    tick[in_time] = np.arange(1, len(in_time) + 1)
    entries = Entries(
        n_bytes=np.concatenate((older.n_bytes, log.n_bytes[lived.born])),
        born=np.concatenate((np.zeros(len(older.n_bytes), dtype=np.int64), tick[lived.born])),
        died=np.concatenate((tick[older.died], tick[lived.died])),
        storage=np.concatenate((older.storage, _join(log, lived, tracked, skew_ns))),
        time_ns=np.concatenate((np.zeros(len(older.n_bytes), dtype=np.int64), log.time_ns[lived.born] - skew_ns)),
        events=in_time,
    )
    return entries, event_ns[in_time] - skew_ns
