"""A recorded history: the state before its first event, the bytes after each event, and what other options would do.

`Books` plays none of the allocator's rules: a block's place shows its size, because a rest too small to be split off
lies between the block and the next one. `engine/device/allocator.py` reads a step of its own this way. The same
requests then go through `caching_allocator.py` under other options.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import chain

from explorer.errors import UnreadableFile
from explorer.plan.card.allocator_options import MIB, OTHER_OPTIONS, AllocatorOptions, parse_options
from explorer.plan.card.caching_allocator import SMALL_SEGMENT, CachedBlock, CachingAllocator, OutOfCardMemory
from explorer.plan.card.frames import HistoryMove, Movements
from explorer.plan.card.snapshot import DeviceSnapshot, HistoryEvent, SnapshotBlock, SnapshotSegment
from explorer.record.base import Record
from explorer.record.history import DeviceHistory, RefusedInHistory, SimulatedHistory

RETURNED = ("segment_free", "segment_unmap")


class DeviceStart(Record):
    """Segments and used blocks of a device before the first event."""

    reserved_bytes: int
    segments: dict[int, SnapshotSegment]
    """By address; those of expandable segments left out: their stretches have no fixed borders."""
    blocks: dict[int, SnapshotBlock]
    freed: frozenset[int] = frozenset()
    """Addresses of used blocks whose free is requested and not completed: another stream may still read them."""


def start_of(device: DeviceSnapshot, options: AllocatorOptions) -> DeviceStart:
    """The state before the first event. Raises UnreadableFile if events and segments contradict each other."""
    reserved = sum(segment.n_bytes for segment in device.segments)
    segments = {segment.address: segment for segment in device.segments if not segment.is_expandable}
    blocks = {block.address: block for block in device.blocks}
    freed = {block.address for block in device.blocks if block.is_freed}
    has_requests = any(event[0] == "free_requested" for event in device.events)
    for action, address, n_bytes, stream in reversed(device.events):
        match action:
            case "alloc":
                if blocks.pop(address, None) is None:
                    raise contradiction(device, "a request's block is neither freed nor there at the end")
            case "free_requested":
                freed.discard(address)
            case "free_completed":
                if address in blocks:
                    raise contradiction(device, "a block is handed out while it is in use")
                if has_requests:
                    freed.add(address)
                blocks[address] = SnapshotBlock(
                    address=address, n_bytes=options.rounded(n_bytes), request_bytes=n_bytes, stream=stream
                )
            case "segment_alloc":
                segments.pop(address, None)
                reserved -= n_bytes
            case "segment_map":
                reserved -= n_bytes
            case "segment_free":
                reserved += n_bytes
                segments[address] = SnapshotSegment(
                    address=address, n_bytes=n_bytes, stream=stream, is_small=n_bytes == SMALL_SEGMENT
                )
            case "segment_unmap":
                reserved += n_bytes
        if reserved < 0:
            raise contradiction(device, "more was taken from the driver than is there at the end")
    return DeviceStart(reserved_bytes=reserved, segments=segments, blocks=blocks, freed=frozenset(freed & set(blocks)))


class Books:
    """Bytes in use by the record alone: a block's place shows which rest was too small to be split off (rule 4)."""

    def __init__(self, start: DeviceStart, options: AllocatorOptions) -> None:
        self.options = options
        self.starts = sorted(start.segments)
        self.segments = {address: (s.n_bytes, s.is_small) for address, s in start.segments.items()}
        self.used = sorted(start.blocks)
        self.blocks = {
            address: (block.request_bytes, self._block_bytes(address, block.n_bytes))
            for address, block in start.blocks.items()
        }
        self.requested = sum(request for request, _ in self.blocks.values())
        self.freed = set(start.freed)
        self.allocated = sum(size for address, (_, size) in self.blocks.items() if address not in self.freed)
        self.reserved = start.reserved_bytes
        self.peaks = (self.requested, self.allocated, self.reserved)

    def apply(self, action: str, address: int, n_bytes: int) -> None:
        """Counts one event. `requested` falls when a free is completed, `allocated` when it is requested."""
        if action == "free_requested":
            if address in self.blocks and address not in self.freed:
                self.freed.add(address)
                self.allocated -= self.blocks[address][1]
        elif action == "free_completed":
            request, size = self.blocks.pop(address)
            self.requested -= request
            if address in self.freed:
                self.freed.discard(address)
            else:
                self.allocated -= size
            del self.used[bisect_left(self.used, address)]
        elif action in RETURNED:
            self.reserved -= n_bytes
            if self.segments.pop(address, None) is not None:
                del self.starts[bisect_left(self.starts, address)]
        elif action == "alloc":
            insort(self.used, address)
            size = self._block_bytes(address, self.options.rounded(n_bytes))
            self._grow_older_block(address)
            self.blocks[address] = n_bytes, size
            self.requested, self.allocated = self.requested + n_bytes, self.allocated + size
            requested, allocated, reserved = self.peaks
            self.peaks = max(requested, self.requested), max(allocated, self.allocated), reserved
        else:
            self.reserved += n_bytes
            self.peaks = *self.peaks[:2], max(self.peaks[2], self.reserved)
            if action == "segment_alloc" and address not in self.segments:
                insort(self.starts, address)
                self.segments[address] = n_bytes, n_bytes == SMALL_SEGMENT

    def _segment(self, address: int) -> tuple[int, int, bool] | None:
        """Begin, end and kind of the fixed segment around an address. None: there is none."""
        at = bisect_right(self.starts, address) - 1
        if at < 0:
            return None
        n_bytes, is_small = self.segments[self.starts[at]]
        end = self.starts[at] + n_bytes
        return (self.starts[at], end, is_small) if address < end else None

    def _block_bytes(self, address: int, size: int) -> int:
        """Bytes of the block at an address: `size`, and what lies between it and the next block if it is no block."""
        if size <= MIB or (segment := self._segment(address)) is None:
            return size  # a small pool splits off every rest
        _, end, is_small = segment
        after = bisect_right(self.used, address)
        if after < len(self.used):
            end = min(end, self.used[after])
        rest = end - address - size
        return size if rest <= 0 or self.options.is_split(size, rest, is_small=is_small) else size + rest

    def _grow_older_block(self, address: int) -> None:
        """A small gap before a new block shows that the older block there is larger than was known."""
        at = bisect_left(self.used, address)
        if at == 0 or (segment := self._segment(address)) is None or segment[2]:
            return
        older = self.used[at - 1]
        request, n_bytes = self.blocks[older]
        gap = address - older - n_bytes
        if older >= segment[0] and 0 < gap <= MIB:
            self.blocks[older] = request, n_bytes + gap
            self.allocated += 0 if older in self.freed else gap


def contradiction(device: DeviceSnapshot, what: str) -> UnreadableFile:
    return UnreadableFile(
        f"Events and segments of device {device.device} contradict each other: {what}.",
        hint="Record and write the snapshot in one process, without a pluggable allocator.",
    )


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
        n_events=len(events),
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
