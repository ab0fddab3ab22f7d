"""Bytes by rank from the allocator's events: memory belongs to the rank that was acting at its allocation.

In one process ranks take turns, so the windows of their actions show the rank of an allocation, whichever rank frees
the memory. Parameters and buffers are older than the recording and are counted, not measured.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from explorer.engine.device.allocator import AllocatorLog, Probe, clock_skew_ns, lifetimes, take_probe
from explorer.engine.device.device import Device
from explorer.record.pipeline_run import ActionTime, RankMemory, rank_memory

BUFFERS = "receive buffers"


@dataclass(frozen=True)
class ActionWindow:
    """From `start_ns` to `end_ns` (Unix time) one rank did `name`."""

    start_ns: int
    end_ns: int
    rank: int
    name: str


class MemoryWatch:
    """Records allocations between enter and exit. `doing` marks the acting rank."""

    def __init__(self, device: Device) -> None:
        self.windows: list[ActionWindow] = []
        self._device = device.torch
        self._recorder = device.recorder()
        self._probes: list[Probe] = []

    def __enter__(self) -> Self:
        self._recorder.__enter__()
        self._probe()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._probe()
        self._recorder.__exit__(kind, error, traceback)

    def _probe(self) -> None:
        with suppress(Exception):  # a device without memory has none for a probe either, and the recording must end
            self._probes.append(take_probe(self._device, number=len(self._probes)))

    @contextmanager
    def doing(self, rank: int, name: str) -> Iterator[None]:
        """Everything allocated inside belongs to `rank`."""
        start = time.time_ns()
        try:
            yield
        finally:
            self.windows.append(ActionWindow(start, time.time_ns(), rank, name))

    def ranks(
        self, parameter_bytes: Mapping[int, int], receive_bytes: Mapping[int, int], clock: tuple[ActionTime, ...]
    ) -> tuple[RankMemory, ...]:
        """A series per rank of `parameter_bytes`. Samples move from their window to the action's time on `clock`."""
        log = self._recorder.log
        skew = clock_skew_ns(log, tuple(self._probes))
        when = {(time.rank, time.name): (time.start_ms * 1e6, time.end_ms * 1e6) for time in clock}
        windows = sorted(self.windows, key=lambda window: window.start_ns)
        starts = np.array([window.start_ns for window in windows], dtype=np.int64)
        at = np.searchsorted(starts, log.time_ns - skew, side="right") - 1
        series = {rank: _Series(log, at, windows, rank, when, skew) for rank in parameter_bytes}
        return tuple(
            rank_memory(
                rank,
                "measured",
                one.samples(parameter_bytes[rank]),
                parameter_bytes=parameter_bytes[rank],
                receive_bytes=receive_bytes.get(rank, 0),
            )
            for rank, one in series.items()
        )


@dataclass(frozen=True)
class _Series:
    log: AllocatorLog
    at: NDArray[np.int64]
    """By event: index of the last window that began before it, -1 for none."""
    windows: list[ActionWindow]
    rank: int
    when: dict[tuple[int, str], tuple[float, float]]
    skew_ns: int

    def samples(self, base_bytes: int) -> list[tuple[int, int, str]]:
        lived = lifetimes(self.log)
        n_events = len(self.log.n_bytes)
        deltas = np.zeros(n_events + 1, dtype=np.int64)
        for born, died in zip(lived.born, lived.died, strict=True):
            index = int(self.at[born])
            if index >= 0 and self.windows[index].rank == self.rank:
                deltas[born] += self.log.n_bytes[born]
                deltas[died] -= self.log.n_bytes[born]
        held, last = base_bytes, 0
        samples = [(0, held, "")]
        for event in np.flatnonzero(deltas[:n_events]):
            held += int(deltas[event])
            window = self.windows[int(self.at[event])]
            moment = self._moment(window, int(self.log.time_ns[event]) - self.skew_ns)
            last = max(last, last if moment is None else moment)
            own = window.rank == self.rank and moment is not None
            samples.append((last, held, window.name if own else ""))
        return samples

    def _moment(self, window: ActionWindow, time_ns: int) -> int | None:
        """`time_ns` within `window` converted to the clock of the actions; None for another rank's window."""
        span = self.when.get((window.rank, window.name))
        if span is None or window.rank != self.rank:
            return None
        share = (time_ns - window.start_ns) / max(window.end_ns - window.start_ns, 1)
        return round(span[0] + min(max(share, 0.0), 1.0) * (span[1] - span[0]))
