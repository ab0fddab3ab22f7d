"""What a recorded history held on its card, and what other options of the allocator would have reserved.

`snapshot.py` reads the record. The state before its first event is derived from the segments at its end, by going
through the events from last to first. The figures of the record need no rule of the allocator except the one that a
small rest stays with its block. The same requests then go through `caching_allocator.py` under other options.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from explorer.errors import UnreadableFile
from explorer.plan.card.allocator_options import MIB, AllocatorOptions, parse_options
from explorer.plan.card.caching_allocator import SMALL_SEGMENT, CachedBlock, CachingAllocator, OutOfCardMemory
from explorer.plan.card.snapshot import DeviceSnapshot, Snapshot, SnapshotBlock, SnapshotSegment
from explorer.record.base import Count, Record

OTHER_OPTIONS = ("expandable_segments:True", "roundup_power2_divisions:4", "max_split_size_mb:128")
RETURNED = ("segment_free", "segment_unmap")


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


class DeviceStart(Record):
    """Segments and used blocks of a device before the first event."""

    reserved_bytes: int
    segments: dict[int, SnapshotSegment]
    """By address; those of expandable segments left out: their stretches have no fixed borders."""
    blocks: dict[int, SnapshotBlock]


def histories_of(snapshot: Snapshot) -> tuple[DeviceHistory, ...]:
    """Figures of each device, under the recorded options and others. Raises UnreadableFile."""
    return tuple(_history(device, snapshot.options) for device in snapshot.devices)


def start_of(device: DeviceSnapshot, options: AllocatorOptions) -> DeviceStart:
    """The state before the first event. Raises UnreadableFile if events and segments contradict each other."""
    reserved = sum(segment.n_bytes for segment in device.segments)
    segments = {segment.address: segment for segment in device.segments if not segment.is_expandable}
    blocks = {block.address: block for block in device.blocks}
    for action, address, n_bytes, stream in reversed(device.events):
        match action:
            case "alloc":
                if blocks.pop(address, None) is None:
                    raise _contradiction(device, "a request's block is neither freed nor there at the end")
            case "free_completed":
                if address in blocks:
                    raise _contradiction(device, "a block is handed out while it is in use")
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
            raise _contradiction(device, "more was taken from the driver than is there at the end")
    return DeviceStart(reserved_bytes=reserved, segments=segments, blocks=blocks)


class _Books:
    """Bytes in use by the record alone: a block's place shows which rest was too small to be split off (rule 4)."""

    def __init__(self, start: DeviceStart, options: AllocatorOptions) -> None:
        self.options = options
        self.starts = sorted(start.segments)
        self.segments = {address: (s.n_bytes, s.is_small) for address, s in start.segments.items()}
        self.used = sorted(start.blocks)
        self.blocks = {address: (block.request_bytes, block.n_bytes) for address, block in start.blocks.items()}
        for address, (request, n_bytes) in self.blocks.items():
            self.blocks[address] = request, self._block_bytes(address, n_bytes)
        self.requested = sum(request for request, _ in self.blocks.values())
        self.allocated = sum(n_bytes for _, n_bytes in self.blocks.values())
        self.reserved = start.reserved_bytes
        self.peaks = (self.requested, self.allocated, self.reserved)

    def apply(self, action: str, address: int, n_bytes: int) -> None:
        if action == "free_completed":
            request, size = self.blocks.pop(address)
            self.requested, self.allocated = self.requested - request, self.allocated - size
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
            self.allocated += gap


def _history(device: DeviceSnapshot, options: AllocatorOptions) -> DeviceHistory:
    start = start_of(device, options)
    books = _Books(start, options)
    refused = []
    for index, (action, address, n_bytes, _) in enumerate(device.events):
        if action != "oom":
            books.apply(action, address, n_bytes)
            continue
        refused.append(
            RefusedInHistory(
                event=index,
                n_bytes=n_bytes,
                driver_free_bytes=address,
                allocated_bytes=books.allocated,
                reserved_bytes=books.reserved,
            )
        )
    requested, allocated, reserved = books.peaks
    if requested > allocated or allocated > reserved:
        raise _contradiction(device, "more is in use than was taken from the driver")
    capacity = max((refusal.reserved_bytes + refusal.driver_free_bytes for refusal in refused), default=None)
    settings = [("", options), *((text, parse_options(text)) for text in OTHER_OPTIONS)]
    return DeviceHistory(
        device=device.device,
        n_events=len(device.events),
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


def _contradiction(device: DeviceSnapshot, what: str) -> UnreadableFile:
    return UnreadableFile(
        f"Events and segments of device {device.device} contradict each other: {what}.",
        hint="Record and write the snapshot in one process, without a pluggable allocator.",
    )
