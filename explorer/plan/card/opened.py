"""A memory history from a file of another program: a snapshot of torch's allocator, or a trace of torch's profiler."""

from __future__ import annotations

import gc
from pathlib import Path

from msgspec.structs import replace

from explorer.errors import UnreadableFile
from explorer.plan.card.frames import CPU_LABEL, timeline_of
from explorer.plan.card.history import device_history
from explorer.plan.card.kineto import GZIP_HEAD, read_trace_file
from explorer.plan.card.snapshot import LARGEST_BYTES, PICKLE_HEAD, snapshot_of
from explorer.record.history import MemoryHistory
from explorer.record.sound import unsound

SUFFIXES = ("pickle", "pkl", "json", "gz")
"""Ends of the names of such files."""


def is_history(head: bytes) -> bool:
    """Whether a file that begins so can be a history: a pickle, JSON, or JSON packed by gzip."""
    return head[:1] == PICKLE_HEAD or head[:2] == GZIP_HEAD or head.lstrip()[:1] in (b"{", b"[")


def read_history(path: Path) -> MemoryHistory:
    """The history in a file. Raises UnreadableFile."""
    try:
        with path.open("rb") as file:
            return open_history(file.read(LARGEST_BYTES + 1), path.name)
    except OSError as error:
        raise UnreadableFile(f"{path.name} cannot be read: {error.strerror}.") from error


def open_history(data: bytes, name: str) -> MemoryHistory:
    """The history in the bytes of a file of this name. Raises UnreadableFile."""
    was_enabled = gc.isenabled()
    gc.disable()  # a file of millions of small objects without cycles: a third of the time is the collector's
    try:
        return _opened(data, name)
    finally:
        if was_enabled:
            gc.enable()


def _opened(data: bytes, name: str) -> MemoryHistory:
    if len(data) > LARGEST_BYTES:
        raise UnreadableFile(f"{name} has more than {LARGEST_BYTES >> 20} MiB.", hint="Record fewer events.")
    is_snapshot = data[:1] == PICKLE_HEAD
    if is_snapshot:
        snapshot = snapshot_of(data, name)
        devices = [device_history(device, snapshot.options) for device in snapshot.devices]
        stacks = snapshot.stacks
    else:
        devices, stacks = read_trace_file(data, name)
    runs = tuple(timeline_of(movements, stacks, name, figures.label) for figures, movements in devices)
    history = MemoryHistory(
        file=name,
        source="memory snapshot" if is_snapshot else "profiler trace",
        devices=tuple(
            replace(figures, requested_bytes=run.held_peak_bytes) if figures.name == CPU_LABEL else figures
            for (figures, _), run in zip(devices, runs)
        ),
        runs=runs,
    )
    if not devices:
        raise UnreadableFile(f"{name} has neither segments nor events.", hint="Record before the first step.")
    if fault := unsound(history):
        raise UnreadableFile(f"{name} holds no history that can have happened: {fault}.", hint="Record it again.")
    return history
