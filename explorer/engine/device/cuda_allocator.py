"""CUDA's caching allocator, read through its own history: requested bytes to the byte, allocated and reserved beside.

requested   what tensors asked for; falls when a free is completed       requested_bytes.all
allocated   the blocks handed out: falls when a free is requested        allocated_bytes.all
reserved    segments taken from the driver, cached blocks included       reserved_bytes.all

1. The history lists requests, not blocks. The size of a block follows from its place: a rest that is too small to be
   split off lies between the block and the next one (`plan/card/books.py`). Only a block that is older than the
   recording and dies before its next neighbour comes may be larger than it seems.
2. The curves are fixed at their ends, to the allocator's counters after the last event. The history is a ring: if its
   beginning is lost, the remaining events are still right. The sum of the events then does not lead from the counter
   before to the counter after, which shows the loss.
Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch

from explorer.engine.device.allocator import EMPTY, AllocatorLog, Ints, Refusal
from explorer.errors import NotOnThisDevice, UnreadableFile
from explorer.plan.card.history import Books, start_of
from explorer.plan.card.snapshot import DeviceSnapshot, snapshot_in

MAX_ENTRIES = 4_000_000
CLOCK_GRAIN_NS = 1000
"""The history has times in whole microseconds, rounded down."""


class CudaRecorder:
    """Records between enter and exit; see `Recorder`. The history is switched off on exit, also after an exception.

    Entering raises NotOnThisDevice if torch runs without its caching allocator: other allocators keep no history.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.log = AllocatorLog(time_ns=EMPTY, pointer=EMPTY, n_bytes=EMPTY)
        self._before: dict[str, int] = {}

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self.device)
        _require_history(torch.cuda.memory_stats(self.device))
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
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        self.log = read_trace(snapshot, index, self._before, after)


def read_trace(snapshot: dict[str, Any], device: int, before: dict[str, int], after: dict[str, int]) -> AllocatorLog:
    """The events of one device in a snapshot. `before` and `after` are memory_stats around the recording."""
    trace = snapshot["device_traces"][device]
    signs = {"alloc": 1, "free_completed": -1}
    moves = [
        (
            int(entry["time_us"]) * CLOCK_GRAIN_NS + CLOCK_GRAIN_NS // 2,
            entry["addr"],
            signs[entry["action"]] * entry["size"],
        )
        for entry in trace
        if entry["action"] in signs and entry["size"]
    ]
    columns = np.array(moves, dtype=np.int64).reshape(-1, 3)
    n_bytes = columns[:, 2]
    base_bytes = after["requested_bytes.all.current"] - int(n_bytes.sum())
    curves, contradiction = _curves(snapshot, device, after)
    refused = [Refusal(entry["size"], entry.get("device_free")) for entry in trace if entry["action"] == "oom"]
    return AllocatorLog(
        # Threads read the clocks of different cores: the order of the history is right, its clock may step back.
        time_ns=np.maximum.accumulate(columns[:, 0]),
        pointer=columns[:, 1],
        n_bytes=n_bytes,
        clock_grain_ns=CLOCK_GRAIN_NS,
        base_bytes=base_bytes,
        allocated=None if curves is None else curves[0],
        reserved=None if curves is None else curves[1],
        requested_peak_bytes=after["requested_bytes.all.peak"],
        allocated_peak_bytes=after["allocated_bytes.all.peak"],
        reserved_peak_bytes=after["reserved_bytes.all.peak"],
        refusal=refused[-1] if refused else None,
        contradiction=contradiction,
        is_complete=base_bytes == before["requested_bytes.all.current"] and len(trace) < MAX_ENTRIES,
    )


def _curves(snapshot: dict[str, Any], number: int, after: dict[str, int]) -> tuple[tuple[Ints, Ints] | None, str]:
    """Allocated and reserved bytes before the first event of the log and after each; or why there are none."""
    try:
        of_device = [segment for segment in snapshot["segments"] if segment["device"] == number]
        traces = [[]] * number + [snapshot["device_traces"][number]]
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
        return None, error.sentence
    allocated, reserved = np.array(points, dtype=np.int64).T
    return (
        allocated + after["allocated_bytes.all.current"] - books.allocated,
        reserved + after["reserved_bytes.all.current"] - books.reserved,
    ), ""


def _require_history(stats: dict[str, int]) -> None:
    backend = torch.cuda.get_allocator_backend()
    if backend != "native" or "requested_bytes.all.peak" not in stats:
        raise NotOnThisDevice(
            f"torch allocates through {backend} here, which keeps no history of requested bytes.",
            hint="Unset PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF (backend) and PYTORCH_NO_CUDA_MEMORY_CACHING.",
        )
