"""Events of an allocator, in one form for both devices: every memory total is the sum of such events.

event   1      2      3      4      5           block A lives from event 1 to 4, B from 2 on
        +A     +B     -x     -A     +C          x is older than the recording: `older_frees`
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Refusal:
    """An allocation that did not succeed; `free_bytes` is None if the error does not name it."""

    asked_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class AllocatorLog:
    """Events in order. `n_bytes` is positive for an allocation and negative for a free, in requested bytes."""

    time_ns: Ints
    """Since the Unix epoch, on the allocator's own clock."""
    pointer: Ints
    n_bytes: Ints
    clock_grain_ns: int = 0
    """Resolution of the allocator's clock: an event may lie this far from its recorded time."""
    base_bytes: int | None = None
    """Requested bytes held before the first event; None if the allocator does not report them."""
    allocated: Ints | None = None
    """Allocated bytes before the first event and after each, derived (cuda_allocator.py, 1). None if the allocator
    does not round requests."""
    reserved: Ints | None = None
    """Reserved bytes before the first event and after each."""
    requested_peak_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    refusal: Refusal | None = None
    is_complete: bool = True
    """False if the allocator's history overflowed: the oldest events are missing then."""


class Recorder(Protocol):
    """Records the allocator's events between enter and exit; `log` stands after the exit, also after an exception."""

    log: AllocatorLog

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class Lifetimes:
    """Birth and death of each block that was allocated during the recording. Events are indices into the log."""

    born: Ints
    """Event that allocated the block."""
    died: Ints
    """Event that freed the block; the number of events if the block is alive at the end."""
    older_frees: Ints
    """Events that free a block older than the recording."""


def lifetimes(log: AllocatorLog) -> Lifetimes:
    """Pairs each allocation with the next event of the same pointer.

    An allocation at a pointer that is still alive ends the older block there: the log lacks the free of that block.
    """
    n_events = len(log.pointer)
    order = np.argsort(log.pointer, kind="stable")
    pointer, allocates = log.pointer[order], log.n_bytes[order] > 0
    same = pointer[1:] == pointer[:-1]
    ends = np.full(n_events, n_events, dtype=np.int64)
    ends[:-1][same] = order[1:][same]
    follows = np.zeros(n_events, dtype=bool)
    follows[1:] = same & allocates[:-1]
    born, died = order[allocates], ends[allocates]
    in_time = np.argsort(born)
    return Lifetimes(born[in_time], died[in_time], np.sort(order[~allocates & ~follows]))


def peak_bytes(log: AllocatorLog, base_bytes: int) -> int:
    """Most bytes held at any event; `base_bytes` are held before the first. Frees of older blocks count on CUDA only,
    where the allocator reports their size."""
    lived = lifetimes(log)
    deltas = np.zeros(len(log.pointer) + 1, dtype=np.int64)
    np.add.at(deltas, lived.born, log.n_bytes[lived.born])
    np.add.at(deltas, lived.died, -log.n_bytes[lived.born])
    if log.base_bytes is not None:
        np.add.at(deltas, lived.older_frees, log.n_bytes[lived.older_frees])
    held = np.cumsum(deltas[:-1])
    return base_bytes + max(0, int(held.max(initial=0)))


PROBE_BYTES = 4099
"""An odd size that no model asks for. Each try asks for two bytes more, so that the log tells the tries apart."""
PROBE_TRIES = 5


@dataclass(frozen=True)
class Probe:
    """A block allocated between two readings of Python's clock: shows how far the allocator's clock is off."""

    n_bytes: int
    before_ns: int
    after_ns: int


def take_probe(device: torch.device, number: int = 0) -> Probe:
    """The probe with the shortest interval of a few tries. Probes of one recording differ in number, hence in size."""
    tries = []
    for i in range(PROBE_TRIES):
        n_bytes = PROBE_BYTES + 2 * (PROBE_TRIES * number + i)
        before_ns = time.time_ns()
        block = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        tries.append(Probe(n_bytes, before_ns, time.time_ns()))
        del block
    return min(tries, key=lambda probe: probe.after_ns - probe.before_ns)


def clock_skew_ns(log: AllocatorLog, probes: Sequence[Probe]) -> int:
    """Allocator's clock minus Python's: the median over the probes in the log; 0 if the log has none of the probes."""
    skews = []
    for probe in probes:
        middle = (probe.before_ns + probe.after_ns) // 2
        times = log.time_ns[log.n_bytes == probe.n_bytes]
        if len(times):
            skews.append(int(times[np.argmin(np.abs(times - middle))]) - middle)
    return int(np.median(skews)) if skews else 0
