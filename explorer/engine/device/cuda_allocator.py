"""CUDA's caching allocator, read through its own history: requested bytes to the byte, allocated and reserved beside.

requested   what tensors asked for; falls when a free is completed       requested_bytes.all
allocated   the blocks handed out: falls when a free is requested        allocated_bytes.all
reserved    segments taken from the driver, cached blocks included       reserved_bytes.all

1. The history lists requests, not blocks, so the allocated curve is derived. Blocks alive at the end have the size
   in the snapshot's segments; other blocks count as their request rounded up to 512 bytes. A block of a large segment
   may be up to 1 MiB larger (the allocator does not split off a small rest). The curve is therefore a lower bound;
   `allocated_peak_bytes` is the allocator's own figure.
2. The curves are fixed at their ends, to the allocator's counters after the last event. The history is a ring: if its
   beginning is lost, the remaining events are still right. The sum of the events then does not lead from the counter
   before to the counter after, which shows the loss.
Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch

from explorer.engine.device.allocator import EMPTY, AllocatorLog, Refusal
from explorer.errors import NotOnThisDevice

MAX_ENTRIES = 4_000_000
CLOCK_GRAIN_NS = 1000
"""The history has times in whole microseconds, rounded down."""
GRAIN_BYTES = 512


class CudaRecorder:
    """Records between enter and exit; see `Recorder`. The history is switched off on exit, also after an exception.

    Entering raises NotOnThisDevice if torch runs without its caching allocator: other allocators keep no history.
    """

    def __init__(self, device: torch.device, *, stacks: bool = False) -> None:
        """`stacks` keeps Python frames for PyTorch's memory viewer; a few KB an event."""
        self.device = device
        self.stacks = stacks
        self.log = AllocatorLog(time_ns=EMPTY, pointer=EMPTY, n_bytes=EMPTY)
        self.snapshot: dict[str, Any] = {}
        self._before: dict[str, int] = {}

    def __enter__(self) -> Self:
        torch.cuda.synchronize(self.device)
        _require_history(torch.cuda.memory_stats(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        _record_history(context="all" if self.stacks else None)
        self._before = torch.cuda.memory_stats(self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            torch.cuda.synchronize(self.device)
            after = torch.cuda.memory_stats(self.device)
            self.snapshot = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(None)
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        blocks = blocks_of(self.snapshot["segments"], index)
        self.log = read_trace(self.snapshot["device_traces"][index], self._before, after, blocks)
        if not self.stacks:
            self.snapshot = {}


@dataclass
class _Curves:
    """Events of requested bytes, and the allocated and reserved curves as changes since the first event."""

    sizes: dict[int, int]
    """Block bytes of the entries, by index in the history, whose blocks are alive at the end."""
    events: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """(time in ns, pointer, requested bytes, allocated so far, reserved so far)"""
    block_bytes: dict[int, int] = field(default_factory=dict)
    """Block bytes by pointer."""
    allocated: int = 0
    reserved: int = 0
    refusal: Refusal | None = None
    n_entries: int = 0

    def add(self, entry: dict[str, Any]) -> None:
        action, size = entry["action"], int(entry.get("size", 0))
        index, self.n_entries = self.n_entries, self.n_entries + 1
        if action == "oom":
            self.refusal = Refusal(size, entry.get("device_free"))
        elif action in ("segment_alloc", "segment_map"):
            self.reserved += size
        elif action in ("segment_free", "segment_unmap"):
            self.reserved -= size
        elif action == "free_requested":
            self.allocated -= self.block_bytes.pop(entry["addr"], _rounded(size))
        elif action == "alloc":
            block = self.block_bytes[entry["addr"]] = self.sizes.get(index, _rounded(size))
            self.allocated += block
            self._event(entry, size)
        elif action == "free_completed":
            self._event(entry, -size)

    def _event(self, entry: dict[str, Any], n_bytes: int) -> None:
        middle_ns = int(entry["time_us"]) * CLOCK_GRAIN_NS + CLOCK_GRAIN_NS // 2
        self.events.append((middle_ns, entry["addr"], n_bytes, self.allocated, self.reserved))


def blocks_of(segments: Iterable[dict[str, Any]], device: int) -> dict[int, int]:
    """Size in bytes of each block in use on `device`, by address, from a snapshot's segments."""
    return {
        block["address"]: int(block["size"])
        for segment in segments
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def read_trace(
    trace: Sequence[dict[str, Any]], before: dict[str, int], after: dict[str, int], blocks: dict[int, int]
) -> AllocatorLog:
    """The events of one device's trace. `before` and `after` are memory_stats around the recording; `blocks` are the
    blocks in use after the recording."""
    last = {entry["addr"]: index for index, entry in enumerate(trace) if entry["action"] == "alloc"}
    curves = _Curves({index: blocks[pointer] for pointer, index in last.items() if pointer in blocks})
    for entry in trace:
        curves.add(entry)
    columns = np.array(curves.events, dtype=np.int64).reshape(-1, 5)
    n_bytes = columns[:, 2]
    base_bytes = after["requested_bytes.all.current"] - int(n_bytes.sum())
    first_allocated = after["allocated_bytes.all.current"] - curves.allocated
    first_reserved = after["reserved_bytes.all.current"] - curves.reserved
    return AllocatorLog(
        # Threads read the clocks of different cores: the order of the history is right, its clock may step back.
        time_ns=np.maximum.accumulate(columns[:, 0]),
        pointer=columns[:, 1],
        n_bytes=n_bytes,
        clock_grain_ns=CLOCK_GRAIN_NS,
        base_bytes=base_bytes,
        allocated=np.append(0, columns[:, 3]) + first_allocated,
        reserved=np.append(0, columns[:, 4]) + first_reserved,
        requested_peak_bytes=after["requested_bytes.all.peak"],
        allocated_peak_bytes=after["allocated_bytes.all.peak"],
        reserved_peak_bytes=after["reserved_bytes.all.peak"],
        refusal=curves.refusal,
        is_complete=base_bytes == before["requested_bytes.all.current"] and curves.n_entries < MAX_ENTRIES,
    )


def _require_history(stats: dict[str, int]) -> None:
    backend = torch.cuda.get_allocator_backend()
    if backend != "native" or "requested_bytes.all.peak" not in stats:
        raise NotOnThisDevice(
            f"torch allocates through {backend} here, which keeps no history of requested bytes.",
            hint="Unset PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF (backend) and PYTORCH_NO_CUDA_MEMORY_CACHING.",
        )


def _record_history(context: Literal["all"] | None) -> None:
    """Starts the history. torch 2.11 to 2.13 take the arguments by name; unknown arguments are left out."""
    arguments: dict[str, Any] = {"stacks": "python", "max_entries": MAX_ENTRIES, "clear_history": True}
    parameters = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    if "max_entries" not in parameters:
        raise NotOnThisDevice(
            f"torch {torch.__version__} keeps no allocator history that can be bounded.", hint="Use torch 2.11 to 2.13."
        )
    torch.cuda.memory._record_memory_history(
        "all", context=context, **{name: value for name, value in arguments.items() if name in parameters}
    )


def _rounded(size: int) -> int:
    return -(-size // GRAIN_BYTES) * GRAIN_BYTES
