"""Clocks that charge the step alone: CPU time of this process, or events in the GPU's own stream.

Wall time on a shared machine varies tenfold between equal steps; CPU time with one thread does not
(0.28 to 0.32 s against 0.76 to 12.6 s on two loaded cores, torch 2.13).
"""

from __future__ import annotations

import time
from typing import Any, Literal, Protocol

import torch

ClockName = Literal["process CPU time", "CUDA events"]


class Ticks(Protocol):
    """Marks are cheap; `settle` waits for the device, after which marks can be compared."""

    def mark(self) -> Any: ...

    def settle(self) -> None: ...

    def between_ms(self, first: Any, last: Any) -> float: ...


class Clock(Ticks, Protocol):
    """Ticks with the name that the measurement's record states."""

    name: ClockName


class CpuClock:
    """CPU time of all threads of this process."""

    name: ClockName = "process CPU time"

    def mark(self) -> int:
        return time.process_time_ns()

    def settle(self) -> None:
        """Nothing is under way on a CPU when Python is back."""

    def between_ms(self, first: int, last: int) -> float:
        return (last - first) / 1e6


class WallClock:
    """Time of day: the only clock that several processes share."""

    def mark(self) -> int:
        return time.time_ns()

    def settle(self) -> None:
        """Nothing is under way on a CPU when Python is back."""

    def between_ms(self, first: int, last: int) -> float:
        return (last - first) / 1e6


class CudaClock:
    """Events in the current stream: the time between two events on the GPU.

    A GPU that finishes before Python launches the next kernel waits, and the wait counts. Times of small models are
    therefore times of Python, and so are the hooks of a block.
    """

    name: ClockName = "CUDA events"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def between_ms(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return float(first.elapsed_time(last))
