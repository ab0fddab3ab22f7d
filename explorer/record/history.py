"""A recorded memory history of another program: peaks and refusals of each device, other options, and the timeline.

Such a history has no model of ours. Its timeline is a `Measurement` without one: blocks are frames of modules,
operators are source lines.
"""

from __future__ import annotations

from typing import Literal

from explorer.record.base import Count, Record
from explorer.record.card import FIGURES
from explorer.record.measurement import Measurement
from explorer.record.run import RunSpec


class RefusedInHistory(Record):
    """A request for which the card had no memory."""

    event: Count
    """Place among the events that move memory."""
    n_bytes: Count
    allocated_bytes: Count
    reserved_bytes: Count
    driver_free_bytes: Count | None = None
    """None: the record does not say."""


class SimulatedHistory(Record):
    """The same requests under some options. The simulation begins with the blocks of the start, and an empty cache.

    A request that the record refused counts where it fits.
    """

    options: str
    """As in PYTORCH_CUDA_ALLOC_CONF; empty: the options of the record."""
    allocated_bytes: Count
    reserved_bytes: Count
    n_refused: Count | None = None
    """Requests without memory on a card of this size; None: the size is not known, since nothing was refused."""

    @property
    def stranded_bytes(self) -> int:
        return self.reserved_bytes - self.allocated_bytes


class DeviceHistory(Record):
    """Peaks of a recorded history, as in `torch.cuda.memory_stats`. None: the record does not say."""

    device: Count
    n_events: Count
    first_reserved_bytes: Count | None = None
    """Before the first event."""
    requested_bytes: Count | None = None
    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None
    refused: tuple[RefusedInHistory, ...] = ()
    simulated: tuple[SimulatedHistory, ...] = ()
    name: str = ""
    """Empty: a GPU of this number."""

    @property
    def stranded_bytes(self) -> int | None:
        """Reserved beyond the allocated peak."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes

    @property
    def label(self) -> str:
        """`Device 0`, `CPU`"""
        return self.name or f"Device {self.device}"


class MemoryHistory(Record):
    """A file that another program recorded."""

    file: str
    source: Literal["memory snapshot", "profiler trace"]
    devices: tuple[DeviceHistory, ...]
    runs: tuple[Measurement, ...]

    @property
    def spec(self) -> RunSpec:
        """A spec without a model that could be loaded."""
        return self.runs[0].spec

    @property
    def by_device(self) -> dict[str, Measurement]:
        return {device.label: run for device, run in zip(self.devices, self.runs)}

    def headlines(self) -> dict[str, object]:
        """The derived figures of the list of runs: those of the fullest device."""
        full = max(self.devices, key=lambda device: device.reserved_bytes or device.requested_bytes or 0)
        peak = max((run.held_peak_bytes or 0 for run in self.runs), default=0)
        figures = {name: getattr(full, name) for name in FIGURES}
        return {**figures, "held_peak_bytes": peak, "n_devices": len(self.devices)}
