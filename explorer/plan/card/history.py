"""What a recorded history held on its card, and what other options of the allocator would have reserved.

`snapshot.py` reads the record, `books.py` what it held. The same requests then go through `caching_allocator.py` under
other options.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from explorer.plan.card.allocator_options import OTHER_OPTIONS, AllocatorOptions, parse_options
from explorer.plan.card.books import RETURNED, Books, DeviceStart, contradiction, start_of
from explorer.plan.card.caching_allocator import CachedBlock, CachingAllocator, OutOfCardMemory
from explorer.plan.card.frames import HistoryMove, Movements
from explorer.plan.card.snapshot import DeviceSnapshot, HistoryEvent
from explorer.record.history import DeviceHistory, RefusedInHistory, SimulatedHistory


def device_history(device: DeviceSnapshot, options: AllocatorOptions) -> tuple[DeviceHistory, Movements]:
    """Figures of a device, and what moved there. Raises UnreadableFile if events and segments contradict each other."""
    start = start_of(device, options)
    books = Books(start, options)
    moved, refused = _walk(device, start, books)
    requested, allocated, reserved = books.peaks
    if max(requested, allocated) > reserved:
        raise contradiction(device, "more is in use than was taken from the driver")
    capacity = max((refusal.reserved_bytes + (refusal.driver_free_bytes or 0) for refusal in refused), default=None)
    settings = [("", options), *((text, parse_options(text)) for text in OTHER_OPTIONS)]
    events = [event for event in device.events if event[0] != "free_requested"]
    figures = DeviceHistory(
        device=device.device,
        n_events=sum(event[0] != "free_requested" for event in device.events),
        first_reserved_bytes=start.reserved_bytes,
        requested_bytes=requested,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        refused=tuple(refused),
        simulated=tuple(
            simulated(events, start, CachingAllocator(capacity, played), text) for text, played in settings
        ),
    )
    return figures, moved


def _walk(device: DeviceSnapshot, start: DeviceStart, books: Books) -> tuple[Movements, list[RefusedInHistory]]:
    """Counts every event in the books."""
    moved = Movements(
        older=[HistoryMove(block.address, block.request_bytes, block.stack, 0) for block in start.blocks.values()],
        allocated=[books.allocated],
        reserved=[books.reserved],
    )
    refused = []
    n_events = 0
    for (action, address, n_bytes, _), stack, time_us in zip(device.events, device.stacks, device.times_us):
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
        if action in ("alloc", "free_completed"):
            moved.moves.append(HistoryMove(address, n_bytes if action == "alloc" else -n_bytes, stack, time_us))
            moved.allocated.append(books.allocated)
            moved.reserved.append(books.reserved)
    return moved, refused


def simulated(
    events: Sequence[HistoryEvent], start: DeviceStart, allocator: CachingAllocator, text: str
) -> SimulatedHistory:
    """Runs of returned segments are one emptied cache, whether the driver was short of memory or the program asked."""
    blocks: dict[int, CachedBlock] = {}
    n_refused = allocated = reserved = 0
    older = [("alloc", block.address, block.request_bytes, block.stream) for block in start.blocks.values()]
    before = ""
    for action, address, n_bytes, stream in chain(sorted(older), events):
        if action == "free_completed":
            if (block := blocks.pop(address, None)) is not None:
                allocator.release(block)
        elif action == "alloc" or action == "oom":  # noqa: PLR1714 - a tuple takes twice the time
            try:
                block = allocator.allocate(n_bytes, stream)
            except OutOfCardMemory:
                n_refused += 1
                continue
            if allocator.allocated_bytes > allocated:
                allocated = allocator.allocated_bytes
            if allocator.reserved_bytes > reserved:
                reserved = allocator.reserved_bytes
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
