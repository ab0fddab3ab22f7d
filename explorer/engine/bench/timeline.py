"""The timeline's entries without names: the allocator's blocks of one step, each with the storage in the block.

Steps 1 to 4 of attribution.py: cut the record to the step, join blocks and storages, add earlier memory, and
number the events that change the total. `TrackedStep` has the tracker's columns as arrays.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from explorer.engine.device.allocator import AllocatorLog, Ints, Lifetimes, are_workspaces
from explorer.engine.watch.storages import NONE
from explorer.engine.watch.tracker import BACKWARD, FORWARD, OP_COLUMNS, RECOMPUTE, Tracker
from explorer.record.allocations import PHASES, ROLES
from explorer.record.base import Column

SLACK_NS = 1_000
"""Disagreement of two clocks of one machine after correction of their skew. The allocator's grain is added."""


@dataclass(frozen=True)
class Entries:
    """Columns of the timeline under construction; `born` and `died` are ticks."""

    n_bytes: Ints
    born: Ints
    died: Ints
    storage: Ints
    """The tracker's number, or NONE."""
    is_workspace: NDArray[np.bool_]
    """Whether cuBLAS keeps the block for its later products."""
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
    storage_of_block = np.full(len(lived.born), NONE)
    places = zip(log.pointer[lived.born].tolist(), log.n_bytes[lived.born].tolist())
    candidates: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    for i, place in enumerate(places):
        candidates[place].append(i)
    slack_ns = SLACK_NS + log.clock_grain_ns
    ends_ns = np.append(log.time_ns, np.iinfo(np.int64).max)
    born_ns, died_ns = log.time_ns[lived.born].tolist(), ends_ns[lived.died].tolist()
    storages = zip(tracked.pointer.tolist(), tracked.n_bytes.tolist(), (tracked.seen_ns + skew_ns).tolist())
    for number, (pointer, n_bytes, seen_ns) in enumerate(storages):
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


class _Older(NamedTuple):
    """Columns of the entries from before the step."""

    n_bytes: Ints
    died: Ints
    """An event of the log, the log's length for never, or beyond for the deaths that the log lacks."""
    storage: Ints
    is_block: NDArray[np.bool_]
    """Whether the entry is one block without a storage that has the size of a workspace of cuBLAS."""
    lacking_ns: Ints
    """Times of the deaths that the log lacks."""


def _older(log: AllocatorLog, lived: Lifetimes, tracked: TrackedStep, skew_ns: int) -> _Older:
    """The entries from before the step.

    CUDA reports the frees. The CPU's profiler does not, so the tracker's deaths of storages are used.
    """
    before = slice(0, tracked.n_before_step)
    end = len(log.time_ns)
    n_bytes, died = tracked.n_bytes[before].tolist(), [end] * tracked.n_before_step
    if log.base_bytes is None:
        gone = np.flatnonzero(tracked.died_ns[before] != NONE)
        for i, number in enumerate(gone.tolist()):
            died[number] = end + 1 + i
        numbers = np.arange(tracked.n_before_step)
        none = np.zeros(len(n_bytes), dtype=bool)
        return _Older(as_ints(n_bytes), as_ints(died), numbers, none, tracked.died_ns[before][gone] + skew_ns)
    number_at = {pointer: i for i, pointer in enumerate(tracked.pointer[before].tolist())}
    frees = lived.older_frees
    for event, pointer, size in zip(frees.tolist(), log.pointer[frees].tolist(), (-log.n_bytes[frees]).tolist()):
        number = number_at.pop(pointer, NONE)
        if number != NONE and n_bytes[number] == size:
            died[number] = event
        else:
            n_bytes.append(size)
            died.append(event)
    named = set(tracked.pointer[before].tolist())
    blocks = [size for address, size in log.older_blocks if address not in named and size in log.workspace_sizes]
    unnamed = [False] * len(n_bytes) + [True] * len(blocks)
    n_bytes += blocks
    died += [end] * len(blocks)
    # The rest of CUDA's base belongs to no tensor of the model: other models of the process, for example.
    rest = log.base_bytes - sum(n_bytes)
    if rest > 0:
        n_bytes.append(rest)
        died.append(end)
        unnamed.append(False)
    storage = np.full(len(n_bytes), NONE)
    storage[before] = np.arange(tracked.n_before_step)
    return _Older(as_ints(n_bytes), as_ints(died), storage, np.array(unnamed, dtype=bool), as_ints([]))


def _unseen_frees(
    log: AllocatorLog, lived: Lifetimes, storage: Ints, tracked: TrackedStep, skew_ns: int
) -> dict[int, int]:
    """Blocks that another thread freed in a step with collectives: time of the free, on the allocator's clock.

    The CPU's profiler sees the step's thread alone. If gloo's thread is the last to let go of a tensor, the log lacks
    the free. The block would last until its address is handed out again; it dies with its storage instead. A copy
    that gloo makes inside a collective has no storage and dies when the collective ends.
    """
    first_ns, last_ns = tracked.collectives_ns
    frees: dict[int, int] = {}
    if log.base_bytes is not None or not len(first_ns):
        return frees
    ends_ns = np.append(log.time_ns, np.iinfo(np.int64).max)[lived.died]
    for block in np.flatnonzero(np.append(log.n_bytes > 0, True)[lived.died]).tolist():
        born_ns = log.time_ns[lived.born[block]] - skew_ns
        inside = np.flatnonzero((first_ns <= born_ns) & (born_ns <= last_ns))
        number = storage[block]
        died_ns = last_ns[inside[0]] if len(inside) else NONE
        if number != NONE:
            died_ns = tracked.died_ns[number]
        if died_ns != NONE:
            frees[block] = min(int(died_ns) + skew_ns, int(ends_ns[block]))
    return frees


def entries_of(log: AllocatorLog, lived: Lifetimes, tracked: TrackedStep, skew_ns: int) -> tuple[Entries, Ints]:
    """The columns, and the time of each tick from 1 on, on the tracker's clock.

    Events of the log are numbered 0..n-1 and n is "never". Deaths that the log lacks are numbered from n + 1.
    """
    n_events, storage = len(log.time_ns), _join(log, lived, tracked, skew_ns)
    older = _older(log, lived, tracked, skew_ns)
    unseen = _unseen_frees(log, lived, storage, tracked, skew_ns)
    died, extra_ns = lived.died.copy(), np.concatenate((older.lacking_ns, as_ints(list(unseen.values()))))
    died[list(unseen)] = n_events + 1 + len(older.lacking_ns) + np.arange(len(unseen))
    counts = np.zeros(n_events + 1 + len(extra_ns), dtype=bool)
    counts[lived.born] = counts[died] = counts[older.died] = True
    counts[n_events] = False
    event_ns = np.concatenate((log.time_ns, [0], extra_ns)).astype(np.int64)
    events = np.flatnonzero(counts)
    in_time = events[np.argsort(event_ns[events], kind="stable")]
    tick = np.full(len(counts), len(in_time) + 1)
    tick[in_time] = np.arange(1, len(in_time) + 1)
    before = np.zeros(len(older.n_bytes), dtype=np.int64)
    n_bytes = np.concatenate((older.n_bytes, log.n_bytes[lived.born]))
    never_freed = np.concatenate((older.is_block, (storage == NONE) & (lived.died == n_events)))
    entries = Entries(
        n_bytes=n_bytes,
        born=np.concatenate((before, tick[lived.born])),
        died=tick[np.concatenate((older.died, died))],
        storage=np.concatenate((older.storage, storage)),
        is_workspace=are_workspaces(n_bytes, never_freed, log.workspace_sizes),
        time_ns=np.concatenate((before, log.time_ns[lived.born] - skew_ns)),
        events=in_time,
    )
    return entries, event_ns[in_time] - skew_ns


SAVED, RECOMPUTED, TEMPORARY = (ROLES.index(role) for role in ("saved activation", "recomputed", "temporary"))


class TrackedStep:
    """The tracker's columns as numpy arrays, without a copy."""

    def __init__(self, tracker: Tracker) -> None:
        columns = tracker.storages
        self.pointer, self.n_bytes = as_ints(columns.pointer), as_ints(columns.n_bytes)
        self.made_by, self.role = as_ints(columns.made_by), as_ints(columns.role)
        self.owner, self.dtype = as_ints(columns.owner), as_ints(columns.dtype)
        self.stream = as_ints(columns.stream)
        self.seen_ns, self.died_ns = as_ints(columns.seen_ns), as_ints(columns.died_ns)
        self.turns = as_ints(columns.turns)
        ops = operators_of(tracker)
        self.op_name, self.op_block, self.op_phase, self.op_first_ns, self.op_last_ns, self.op_line = ops.T
        self.scene_ns, self.scene_phase, self.scene_rerun, self.scene_block = as_ints(tracker.scenes).reshape(-1, 4).T
        ends = [last_ns for *_, last_ns in tracker.collectives]
        self.collectives_ns = ops[np.isin(self.op_last_ns, ends)][:, 3:5].T
        """Beginnings and ends."""
        self.borders = tracker.borders
        self.fqns = tracker.fqns
        self.n_before_step = columns.n_before_step
        self.n_ops = len(ops)

    def turn(self, *, of_death: bool) -> Ints:
        """Position of each storage's birth or death among all turns; the number of turns if there is none."""
        turn_of = np.full(len(self.n_bytes), len(self.turns))
        where = np.flatnonzero(self.turns < 0 if of_death else self.turns > 0)
        turn_of[np.abs(self.turns[where]) - 1] = where
        return turn_of

    def roles(self) -> Ints:
        """Role of each storage: its tag, else by lifetime. A saved activation is born in a forward and outlives it."""
        made = self.made_by != NONE
        phase = np.full(len(self.n_bytes), BACKWARD)
        phase[made] = self.op_phase[self.made_by[made]]
        by_phase = np.full(len(PHASES), TEMPORARY)
        by_phase[RECOMPUTE] = RECOMPUTED
        roles = by_phase[phase]
        born, died = self.turn(of_death=False), self.turn(of_death=True)
        ends = [turn for _, turn in self.borders[1:]] + [len(self.turns)]
        for (border_phase, first), end in zip(self.borders, ends):
            if border_phase == FORWARD:
                roles[(phase == FORWARD) & (born >= first) & (born < end) & (died >= end)] = SAVED
        return np.where(self.role != NONE, self.role, roles)

    def peak_bytes(self, confirmed: NDArray[np.bool_]) -> int:
        """Most bytes held by confirmed storages at any turn."""
        which = np.abs(self.turns) - 1
        deltas = np.where(confirmed[which], np.sign(self.turns) * self.n_bytes[which], 0)
        return int(np.cumsum(deltas).max(initial=0))


def operators_of(tracker: Tracker) -> Ints:
    """One row for each operator of the step, with the columns OP_COLUMNS."""
    return as_ints(tracker.ops).reshape(-1, len(OP_COLUMNS))


def as_ints(values: Column | Sequence[int]) -> Ints:
    """A column as a numpy array of int64."""
    return np.asarray(values, dtype=np.int64)
