"""Events of an allocator, in one form for both devices, and the recorder of each. Every memory total is their sum.

event   1      2      3      4      5           block A lives from event 1 to 4, B from 2 on
        +A     +B     -x     -A     +C          x is older than the recording: `older_frees`

CUDA's caching allocator is read through its own history: requested bytes to the byte, allocated and reserved beside.

requested   what tensors asked for; falls when a free is completed       requested_bytes.all
allocated   the blocks handed out: falls when a free is requested        allocated_bytes.all
reserved    segments taken from the driver, cached blocks included       reserved_bytes.all

1. The history lists requests, not blocks. The size of a block follows from its place: a rest that is too small to be
   split off lies between the block and the next one (`plan/card/history.py`). Only a block that is older than the
   recording and dies before its next neighbour comes may be larger than it seems.
2. The curves are fixed at their ends, to the allocator's counters after the last event. The history is a ring: if its
   beginning is lost, the remaining events are still right. The sum of the events then does not lead from the counter
   before to the counter after, which shows the loss.
Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._profiler import RecordScope, _EventType

from explorer.errors import NotOnThisDevice, UnreadableFile
from explorer.plan.card.torch_rules import lt_workspace_bytes, workspace_bytes
from explorer.record.card import Card

Ints = NDArray[np.int64]
EMPTY: Ints = np.zeros(0, dtype=np.int64)
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before its first use: Kineto prints "USDT: profiler_start" otherwise
PROFILER: Any = torch._C._autograd
ONLY_MEMORY = {RecordScope.STATIC_RUNTIME_MODEL}
"""A scope that nothing here opens, so that the profiler leaves out every operator. The tree of operators is not needed
and costs 0.9 s a step of the sample GPT (torch 2.13). Memory events are recorded in any scope.

The scope of `record_function` is unsafe: an optimizer's step is such a range. If a recording ends inside the range
and the next begins, as between two watched steps, the profiler writes the range's end into freed memory.
"""
MAX_ENTRIES = 4_000_000
CLOCK_GRAIN_NS = 1000
"""The history has times in whole microseconds, rounded down."""


@dataclass(frozen=True)
class Refusal:
    """An allocation that did not succeed; `free_bytes` is None if the error does not name it."""

    asked_bytes: int | None
    free_bytes: int | None
    is_rounded: bool = False
    """Whether the figures are from torch's text, which rounds to hundredths of a MiB or GiB."""


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
    older_blocks: tuple[tuple[int, int], ...] = ()
    """Address and requested bytes of the blocks in `base_bytes` that are alive after the last event."""
    workspace_sizes: tuple[int, int] = (0, 0)
    """Bytes that a thread keeps for cuBLAS, and beside it for cuBLASLt; 0: none, or not known."""
    allocated: Ints | None = None
    """Allocated bytes before the first event and after each, derived (1.).

    None if the allocator does not round requests, or if its history contradicts itself.
    """
    reserved: Ints | None = None
    """Reserved bytes before the first event and after each."""
    requested_peak_bytes: int | None = None
    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    refusal: Refusal | None = None
    contradiction: str = ""
    """Why the history could not be read as blocks of segments."""
    is_complete: bool = True
    """False if the allocator's history overflowed: the oldest events are missing then."""


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
    ends = np.full(n_events, n_events)
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
    return base_bytes + int(np.cumsum(deltas).max(initial=0))


class CpuRecorder:
    """Records the allocator's events between enter and exit; `log` stands after the exit, also after an exception.

    The events are the profiler's: requested bytes, scratch inside kernels included.

    The profiler knows only blocks that it saw allocated: frees of older blocks come without a size or not at all. The
    tracker, which knows the older storages, adds them. The profiler may also report a stale size for a pointer that was
    handed out between two recordings. `_read` drops frees without a size, `lifetimes` those that follow no allocation.
    """

    def __init__(self) -> None:
        self.log = AllocatorLog(time_ns=EMPTY, pointer=EMPTY, n_bytes=EMPTY)

    def __enter__(self) -> Self:
        settings: Any = torch.autograd.profiler.profile(profile_memory=True)
        config, activities = settings.config(), settings.kineto_activities
        PROFILER._prepare_profiler(config, activities)
        PROFILER._enable_profiler(config, activities, ONLY_MEMORY)
        return self

    def __exit__(self, *exc: object) -> None:
        self.log = _read(PROFILER._disable_profiler())


def _read(recorded: Any) -> AllocatorLog:
    """Every memory event of the CPU in order of time."""
    todo: list[Any] = recorded.experimental_event_tree()
    todo.reverse()
    events: list[tuple[int, int, int]] = []
    allocation, cpu = _EventType.Allocation, torch.device("cpu")  # the name of a device takes six times as long
    while todo:
        event = todo.pop()
        if event.tag == allocation:
            fields = event.extra_fields
            if fields.device == cpu and fields.alloc_size:
                events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        else:
            todo.extend(reversed(event.children))
    columns = np.array(events, dtype=np.int64).reshape(-1, 3)
    columns = columns[np.argsort(columns[:, 0], kind="stable")]
    return AllocatorLog(time_ns=columns[:, 0], pointer=columns[:, 1], n_bytes=columns[:, 2])


class CudaRecorder:
    """As CpuRecorder, for a GPU. The history is switched off on exit, also after an exception.

    Entering raises NotOnThisDevice if torch runs without its caching allocator: other allocators keep no history.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.log = AllocatorLog(time_ns=EMPTY, pointer=EMPTY, n_bytes=EMPTY)
        self._before: dict[str, int] = {}

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self.device)
        backend = torch.cuda.get_allocator_backend()
        if backend != "native" or "requested_bytes.all.peak" not in torch.cuda.memory_stats(self.device):
            raise NotOnThisDevice(
                f"torch allocates through {backend} here, which keeps no history of requested bytes.",
                hint="Unset PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF (backend) and PYTORCH_NO_CUDA_MEMORY_CACHING.",
            )
        torch.cuda.reset_peak_memory_stats(self.device)
        torch.cuda.memory._record_memory_history(
            context=None, stacks="python", max_entries=MAX_ENTRIES, clear_history=True
        )
        self._before = torch.cuda.memory_stats(self.device)
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            torch.cuda.synchronize(self.device)
            after = torch.cuda.memory_stats(self.device)
            snapshot = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(None)
        log = read_trace(snapshot, _index(self.device), self._before, after)
        self.log = replace(log, workspace_sizes=workspace_sizes(self.device))


def workspace_sizes(device: torch.device) -> tuple[int, int]:
    """`AllocatorLog.workspace_sizes` of this process on `device`."""
    capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    setting = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    card = Card(name="", total_bytes=0, capability=capability, cublas=setting)
    return workspace_bytes(card), lt_workspace_bytes(card)


def are_workspaces(n_bytes: Ints, unnamed: NDArray[np.bool_], sizes: tuple[int, int]) -> NDArray[np.bool_]:
    """The `unnamed` blocks that cuBLAS keeps, by their size. cuBLASLt has at most one block for each of cuBLAS's."""
    of_cublas, of_lt = (unnamed & (n_bytes == size) for size in sizes)
    return of_cublas | of_lt & (np.cumsum(of_lt) <= of_cublas.sum())


def workspaces_alive(device: torch.device, named: Collection[int]) -> list[int]:
    """Bytes of the blocks that cuBLAS keeps on `device`, those at the addresses `named` left out."""
    blocks = blocks_in(torch.cuda.memory_snapshot(), _index(device))
    n_bytes = np.array([size for address, size in blocks.items() if address not in named], dtype=np.int64)
    are = are_workspaces(n_bytes, np.ones(len(n_bytes), dtype=bool), workspace_sizes(device))
    return [int(size) for size in n_bytes[are]]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def blocks_in(segments: Sequence[dict[str, Any]], device: int) -> dict[int, int]:
    """Requested bytes of the blocks that a snapshot's segments hold on `device`, by address."""
    return {
        block["address"]: block["requested_size"]
        for segment in segments
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def read_trace(snapshot: dict[str, Any], device: int, before: dict[str, int], after: dict[str, int]) -> AllocatorLog:
    """The events of one device in a snapshot. `before` and `after` are memory_stats around the recording."""
    trace = snapshot["device_traces"][device]
    signs = {"alloc": 1, "free_completed": -1}
    moves = [entry for entry in trace if entry["action"] in signs and entry["size"]]
    time_us = np.array([int(entry["time_us"]) for entry in moves], dtype=np.int64)
    n_bytes = np.array([signs[entry["action"]] * entry["size"] for entry in moves], dtype=np.int64)
    base_bytes = after["requested_bytes.all.current"] - int(n_bytes.sum())
    younger = {entry["addr"] for entry in moves if entry["action"] == "alloc"}
    alive = blocks_in(snapshot["segments"], device)
    allocated, reserved, contradiction = _curves(snapshot, device, after)
    refused = [Refusal(entry["size"], entry.get("device_free")) for entry in trace if entry["action"] == "oom"]
    return AllocatorLog(
        # Threads read the clocks of different cores: the order of the history is right, its clock may step back.
        time_ns=np.maximum.accumulate(time_us * CLOCK_GRAIN_NS + CLOCK_GRAIN_NS // 2),
        pointer=np.array([entry["addr"] for entry in moves], dtype=np.int64),
        n_bytes=n_bytes,
        clock_grain_ns=CLOCK_GRAIN_NS,
        base_bytes=base_bytes,
        older_blocks=tuple(block for block in alive.items() if block[0] not in younger),
        allocated=allocated,
        reserved=reserved,
        requested_peak_bytes=after["requested_bytes.all.peak"],
        allocated_peak_bytes=after["allocated_bytes.all.peak"],
        reserved_peak_bytes=after["reserved_bytes.all.peak"],
        refusal=refused[-1] if refused else None,
        contradiction=contradiction,
        is_complete=base_bytes == before["requested_bytes.all.current"] and len(trace) < MAX_ENTRIES,
    )


def _curves(snapshot: dict[str, Any], number: int, after: dict[str, int]) -> tuple[Ints | None, Ints | None, str]:
    """Allocated and reserved bytes before the first event of the log and after each; or why there are none."""
    try:
        of_device = [segment for segment in snapshot["segments"] if segment["device"] == number]
        traces = [[]] * number + [snapshot["device_traces"][number]]
        from explorer.plan.card.history import Books, start_of
        from explorer.plan.card.snapshot import DeviceSnapshot, snapshot_in

        whole = snapshot_in({**snapshot, "segments": of_device, "device_traces": traces})
        device = next(iter(whole.devices), DeviceSnapshot(device=number))
        books = Books(start_of(device, whole.options), whole.options)
        points = [(books.allocated, books.reserved)]
        for action, address, n_bytes, _ in device.events:
            if action != "oom":
                books.apply(action, address, n_bytes)
            if action in ("alloc", "free_completed"):
                points.append((books.allocated, books.reserved))
    except UnreadableFile as error:
        return None, None, error.sentence
    allocated, reserved = np.array(points, dtype=np.int64).T
    return (
        allocated + after["allocated_bytes.all.current"] - books.allocated,
        reserved + after["reserved_bytes.all.current"] - books.reserved,
        "",
    )


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
