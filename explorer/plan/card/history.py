"""What a recorded history held on its card, and what other options of the allocator would have reserved.

`snapshot.py` reads the record, `books.py` what it held. The same requests then go through `caching_allocator.py` under
other options.
"""

from __future__ import annotations

from explorer.plan.card.allocator_options import OTHER_OPTIONS, AllocatorOptions, parse_options
from explorer.plan.card.books import RETURNED, Books, DeviceStart, contradiction, start_of
from explorer.plan.card.caching_allocator import CachedBlock, CachingAllocator, OutOfCardMemory
from explorer.plan.card.snapshot import DeviceSnapshot, Snapshot
from explorer.record.base import Count, Record


class RefusedInHistory(Record):
    """A request for which the card had no memory."""

    event: Count
    """Place among the events that move memory."""
    n_bytes: Count
    driver_free_bytes: Count
    allocated_bytes: Count
    reserved_bytes: Count


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
    """Peaks of a recorded history, as in `torch.cuda.memory_stats`."""

    device: Count
    n_events: Count
    first_reserved_bytes: Count
    """Before the first event."""
    requested_bytes: Count
    allocated_bytes: Count
    reserved_bytes: Count
    refused: tuple[RefusedInHistory, ...] = ()
    simulated: tuple[SimulatedHistory, ...] = ()

    @property
    def stranded_bytes(self) -> int:
        """Reserved beyond the allocated peak."""
        return self.reserved_bytes - self.allocated_bytes


def histories_of(snapshot: Snapshot) -> tuple[DeviceHistory, ...]:
    """Figures of each device, under the recorded options and others. Raises UnreadableFile."""
    return tuple(_history(device, snapshot.options) for device in snapshot.devices)


def _history(device: DeviceSnapshot, options: AllocatorOptions) -> DeviceHistory:
    start = start_of(device, options)
    books = Books(start, options)
    refused = []
    n_events = 0
    for action, address, n_bytes, _ in device.events:
        if action != "oom":
            books.apply(action, address, n_bytes)
        else:
            refused.append(
                RefusedInHistory(
                    event=n_events,
                    n_bytes=n_bytes,
                    driver_free_bytes=address,
                    allocated_bytes=books.allocated,
                    reserved_bytes=books.reserved,
                )
            )
        n_events += action != "free_requested"  # it moves no memory yet
    requested, allocated, reserved = books.peaks
    if max(requested, allocated) > reserved:
        raise contradiction(device, "more is in use than was taken from the driver")
    capacity = max((refusal.reserved_bytes + refusal.driver_free_bytes for refusal in refused), default=None)
    settings = [("", options), *((text, parse_options(text)) for text in OTHER_OPTIONS)]
    return DeviceHistory(
        device=device.device,
        n_events=n_events,
        first_reserved_bytes=start.reserved_bytes,
        requested_bytes=requested,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        refused=tuple(refused),
        simulated=tuple(
            _simulated(device, start, CachingAllocator(capacity, played), text) for text, played in settings
        ),
    )


def _simulated(device: DeviceSnapshot, start: DeviceStart, allocator: CachingAllocator, text: str) -> SimulatedHistory:
    """Runs of returned segments are one emptied cache, whether the driver was short of memory or the program asked."""
    blocks: dict[int, CachedBlock] = {}
    n_refused = allocated = reserved = 0
    older = [("alloc", block.address, block.request_bytes, block.stream) for block in start.blocks.values()]
    before = ""
    for action, address, n_bytes, stream in (*sorted(older), *device.events):
        if action == "free_completed":
            if (block := blocks.pop(address, None)) is not None:
                allocator.release(block)
        elif action in ("alloc", "oom"):
            try:
                block = allocator.allocate(n_bytes, stream)
            except OutOfCardMemory:
                n_refused += 1
                continue
            allocated = max(allocated, allocator.allocated_bytes)
            reserved = max(reserved, allocator.reserved_bytes)
            if action == "alloc":
                blocks[address] = block
            else:
                allocator.release(block)  # the record does not say for how long it would have lived
        elif action in RETURNED and before not in RETURNED:
            allocator.empty_cache()
        before = action
    return SimulatedHistory(
        options=text,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        n_refused=None if allocator.capacity_bytes is None else n_refused,
    )
