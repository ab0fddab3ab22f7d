"""What an allocator says it did: the events from which every total is summed, in one form for both devices.

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
    """An allocation that did not succeed; `free_bytes` is None where nobody said."""

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
    """How far an event may lie from the time it is given: this allocator's clock has no finer steps."""
    base_bytes: int | None = None
    """Requested bytes held before the first event; None: this allocator does not know."""
    allocated: Ints | None = None
    """Allocated bytes before the first event and after each, derived (allocator_cuda.py, 1); None: this allocator hands
    out what is asked."""
    reserved: Ints | None = None
    """Reserved bytes before the first event and after each."""
    requested_peak_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    refusal: Refusal | None = None
    is_complete: bool = True
    """False: events no longer fitted into the allocator's history, and the oldest are missing."""


class Recorder(Protocol):
    """Records the allocator's events between enter and exit; `log` stands after the exit, also after an exception."""

    log: AllocatorLog

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class Lifetimes:
    """One entry a block that was allocated during the recording. Events are indices into the log."""

    born: Ints
    """Event that allocated it."""
    died: Ints
    """Event that freed it; the number of events where it is alive at the end."""
    older_frees: Ints
    """Events that free a block older than the recording."""


def lifetimes(log: AllocatorLog) -> Lifetimes:
    """Pairs each allocation with the next event of the same pointer.

    An allocation at a pointer that is still alive ends the older block there: its free was not seen.
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
    """Most bytes held at any event, `base_bytes` of them before the first; frees of unknown blocks count on CUDA only,
    where the allocator reports them with their size."""
    lived = lifetimes(log)
    deltas = np.zeros(len(log.pointer) + 1, dtype=np.int64)
    np.add.at(deltas, lived.born, log.n_bytes[lived.born])
    np.add.at(deltas, lived.died, -log.n_bytes[lived.born])
    if log.base_bytes is not None:
        np.add.at(deltas, lived.older_frees, log.n_bytes[lived.older_frees])
    held = np.cumsum(deltas[:-1])
    return base_bytes + max(0, int(held.max(initial=0)))


PROBE_BYTES = 4099
"""An odd size that no model asks for; each try asks for two bytes more, so that the log can tell them apart."""
PROBE_TRIES = 5


@dataclass(frozen=True)
class Probe:
    """A block allocated between two readings of Python's clock: it tells the allocator's clock from ours."""

    n_bytes: int
    before_ns: int
    after_ns: int


def take_probe(device: torch.device, number: int = 0) -> Probe:
    """The tightest of a few tries; probes of one recording have different numbers, hence different sizes."""
    tries = []
    for i in range(PROBE_TRIES):
        n_bytes = PROBE_BYTES + 2 * (PROBE_TRIES * number + i)
        before_ns = time.time_ns()
        block = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        tries.append(Probe(n_bytes, before_ns, time.time_ns()))
        del block
    return min(tries, key=lambda probe: probe.after_ns - probe.before_ns)


def clock_skew_ns(log: AllocatorLog, probes: Sequence[Probe]) -> int:
    """Allocator's clock minus Python's: the median over the probes that the log knows; 0 where it knows none."""
    skews = []
    for probe in probes:
        middle = (probe.before_ns + probe.after_ns) // 2
        times = log.time_ns[log.n_bytes == probe.n_bytes]
        if len(times):
            skews.append(int(times[np.argmin(np.abs(times - middle))]) - middle)
    return int(np.median(skews)) if skews else 0
