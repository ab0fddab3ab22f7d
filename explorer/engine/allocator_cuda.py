"""CUDA's caching allocator, read through its own history: requested bytes to the byte, allocated and reserved beside.

requested   what tensors asked for; falls when a free is completed       requested_bytes.all
allocated   the blocks handed out: requests rounded up to 512 bytes      allocated_bytes.all
reserved    segments taken from the driver, cached blocks included       reserved_bytes.all
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch

from explorer.engine.allocator import AllocatorLog, Refusal
from explorer.errors import NotOnThisDevice

MAX_ENTRIES = 4_000_000
GRAIN_BYTES = 512
EMPTY = np.zeros(0, dtype=np.int64)


class CudaRecorder:
    """Records between enter and exit; see `Recorder`. The history is switched off on exit whatever happened."""

    def __init__(self, device: torch.device, *, stacks: bool = False) -> None:
        """`stacks` keeps Python frames for PyTorch's memory viewer; a few KB an event."""
        self.device = device
        self.stacks = stacks
        self.log = AllocatorLog(time_ns=EMPTY, pointer=EMPTY, n_bytes=EMPTY)
        self.snapshot: dict[str, Any] = {}
        self._base: dict[str, int] = {}

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        _record_history(context="alloc" if self.stacks else None)
        self._base = torch.cuda.memory_stats(self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            torch.cuda.synchronize(self.device)
            stats = torch.cuda.memory_stats(self.device)
            self.snapshot = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(None)
        self.log = read_trace(self.snapshot["device_traces"][self.device.index or 0], self._base, stats)


def read_trace(trace: Iterable[dict[str, Any]], base: dict[str, int], stats: dict[str, int]) -> AllocatorLog:
    """The events of one device's trace; `base` and `stats` are memory_stats before and after the recording."""
    events: list[tuple[int, int, int, int, int]] = []
    allocated = base["allocated_bytes.all.current"]
    reserved = base["reserved_bytes.all.current"]
    refusal = None
    n_seen = 0
    for entry in trace:
        action, size = entry["action"], entry["size"]
        n_seen += 1
        if action == "oom":
            refusal = Refusal(size, entry.get("device_free"))
        elif action in ("segment_alloc", "segment_map"):
            reserved += size
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
        elif action == "free_requested":
            allocated -= _rounded(size)
        elif action == "alloc":
            allocated += _rounded(size)
            events.append((_time_ns(entry), entry["addr"], size, allocated, reserved))
        elif action == "free_completed":
            events.append((_time_ns(entry), entry["addr"], -size, allocated, reserved))
    columns = np.array(events, dtype=np.int64).reshape(-1, 5)
    return AllocatorLog(
        time_ns=columns[:, 0],
        pointer=columns[:, 1],
        n_bytes=columns[:, 2],
        base_bytes=base["requested_bytes.all.current"],
        allocated=np.append(base["allocated_bytes.all.current"], columns[:, 3]),
        reserved=np.append(base["reserved_bytes.all.current"], columns[:, 4]),
        requested_peak_bytes=stats["requested_bytes.all.peak"],
        allocated_peak_bytes=stats["allocated_bytes.all.peak"],
        reserved_peak_bytes=stats["reserved_bytes.all.peak"],
        refusal=refusal,
        n_lost=1 if n_seen >= MAX_ENTRIES else 0,
    )


def _record_history(context: Literal["alloc"] | None) -> None:
    """torch 2.11 to 2.13 take these by name; what a version does not know is left out."""
    wanted: dict[str, Any] = {"stacks": "python", "max_entries": MAX_ENTRIES, "clear_history": True}
    known = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    if "max_entries" not in known:
        raise NotOnThisDevice(
            f"torch {torch.__version__} keeps no allocator history that can be bounded.", hint="Use torch 2.11 to 2.13."
        )
    torch.cuda.memory._record_memory_history(
        "all", context=context, **{name: value for name, value in wanted.items() if name in known}
    )


def _rounded(size: int) -> int:
    return -(-size // GRAIN_BYTES) * GRAIN_BYTES


def _time_ns(entry: dict[str, Any]) -> int:
    return int(entry["time_us"]) * 1000
