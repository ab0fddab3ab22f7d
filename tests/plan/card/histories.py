"""Allocator histories of real GPUs, most from public repositories: tests/golden/cuda_histories, origin in each file.

`imaginary__*` are torch 2.13's own on an imaginary H100: `python -m tests.golden.make_imaginary`.

`replay` plays one through our allocator: requests, frees and returned segments are those of the history, the address of
a new segment too; which block a request takes, and when the driver is asked, is the allocator's own doing.
"""

from __future__ import annotations

import gzip
import json
import random
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from explorer.plan.card.allocator_options import parse_options
from explorer.plan.card.caching_allocator import MIB, SMALL_REQUEST, CachedBlock, CachingAllocator, OutOfCardMemory
from explorer.plan.card.history import device_history
from explorer.plan.card.snapshot import Snapshot
from explorer.record.history import DeviceHistory

BASE = 1 << 40
GOLDEN = Path(__file__).resolve().parents[2] / "golden"
FILES = sorted((GOLDEN / "cuda_histories").glob("*.json.gz"))


@dataclass
class Replay:
    """What differed from the history."""

    n_requests: int = 0
    wrong: list[tuple[int, int]] = field(default_factory=list)
    """(recorded address, ours)"""
    older: int = 0
    """Requests that showed that a block older than the recording is larger than its request (rule 4)."""
    invented: int = 0
    """Segments that the history does not have."""
    same_end: bool = False
    allocator: CachingAllocator = field(default_factory=CachingAllocator)
    """As the history left it."""
    peaks: tuple[int, int, int] = (0, 0, 0)
    """Requested, allocated, reserved."""
    freed_bytes: int = 0
    """Blocks whose free is requested and not completed."""
    curve: list[tuple[int, int]] = field(default_factory=list)
    """Allocated and reserved bytes before the first event, and after each request and each completed free."""

    def measure(self) -> None:
        books = self.allocator
        sums = books.requested_bytes, books.allocated_bytes - self.freed_bytes, books.reserved_bytes
        self.peaks = (max(self.peaks[0], sums[0]), max(self.peaks[1], sums[1]), max(self.peaks[2], sums[2]))
        self.curve.append(sums[1:])


def file_named(part: str) -> Path:
    """The one history whose name has `part`."""
    (file,) = [file for file in FILES if part in file.name]
    return file


def document(file: Path) -> dict[str, Any]:
    with gzip.open(file, "rt") as text:
        loaded: dict[str, Any] = json.load(text)
    return loaded


def devices(file: Path) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = document(file)["devices"]
    return loaded


def opening(device: dict[str, Any], allocator: CachingAllocator) -> None:
    """The segments and blocks that were there before the first event."""
    used = sorted(device["first_blocks"])
    addresses = [address for address, *_ in used]
    for start, n_bytes, stream, small in device["first_segments"]:
        inside = used[bisect_right(addresses, start - 1) : bisect_right(addresses, start + n_bytes - 1)]
        least = 512 if small else SMALL_REQUEST + 512
        pool = allocator.pool(stream, is_small=bool(small))
        address, last = start, None
        for size, is_used in _pieces(start, n_bytes, inside, least):
            piece = CachedBlock(address, size, pool, size if is_used else None, start=start, previous=last)
            if last is not None:
                last.next = piece
            allocator.blocks[address] = piece
            if is_used:
                allocator.requested_bytes += size
                allocator.allocated_bytes += size
            else:
                pool.add(piece)
            address, last = address + size, piece
        allocator.segments[start] = n_bytes
        allocator.reserved_bytes += n_bytes


def _pieces(start: int, n_bytes: int, used: list[list[int]], least: int) -> Iterator[tuple[int, bool]]:
    """Blocks of a segment. A free block has at least `least` bytes: a smaller gap belongs to the block before it."""
    address, ends = start, [block[0] for block in used[1:]] + [start + n_bytes]
    for (block, size, *_), end in zip(used, ends):
        if block > address:
            yield block - address, False
        rest = end - block - size
        address = end if rest < least else block + size
        yield address - block, True
    if start + n_bytes > address:
        yield start + n_bytes - address, False


@cache
def replays(file: Path) -> tuple[tuple[dict[str, Any], Replay], ...]:
    """The devices of a file, each with its replay. Not to be changed."""
    return tuple((device, replay(device)) for device in devices(file))


def replay(device: dict[str, Any]) -> Replay:
    outcome = Replay()
    calls: deque[tuple[int, int]] = deque()

    def recorded_address(n_bytes: int) -> int:
        if calls and calls[0][1] == n_bytes:
            return calls.popleft()[0]
        outcome.invented += 1
        return -outcome.invented << 40

    allocator = outcome.allocator = CachingAllocator(new_address=recorded_address)
    opening(device, allocator)
    outcome.measure()
    used = {address: block for address, block in allocator.blocks.items() if block.request_bytes is not None}
    kinds = device["kinds"]
    for kind, address, n_bytes, stream in device["events"]:
        match kinds[kind]:
            case "segment_alloc":
                calls.append((address, n_bytes))
            case "segment_free":
                allocator.release_segment(address)
            case "free_requested":
                outcome.freed_bytes += used[address].n_bytes
            case "free_completed":
                outcome.freed_bytes -= used[address].n_bytes
                allocator.release(used.pop(address))
                outcome.measure()
            case "alloc":
                outcome.n_requests += 1
                outcome.older += _grow_older_block(allocator, address)
                block = used[address] = allocator.allocate(n_bytes, stream)
                if block.address != address:
                    outcome.wrong.append((address, block.address))
                outcome.measure()
    ends = {address: n_bytes for address, n_bytes, *_ in device["last_segments"]}
    outcome.same_end = ends == allocator.segments and not calls
    return outcome


def snapshot(device: dict[str, Any], allocator: CachingAllocator) -> dict[str, Any]:
    """The history as torch dumps it: its events, and at their end the blocks that the replay left in each segment."""
    blocks = sorted(allocator.blocks.values(), key=lambda block: block.address)
    addresses = [block.address for block in blocks]
    segments = []
    for start, n_bytes, allocated, active, stream in device["last_segments"]:
        inside = blocks[bisect_left(addresses, start) : bisect_left(addresses, start + n_bytes)]
        sizes = {"allocated_size": allocated, "active_size": active, "frames": []}
        segments.append(_segment(start, n_bytes, stream, inside) | sizes)
    trace = [
        event(device["kinds"][kind], address, n_bytes) | {"stream": stream, "time_us": i, "device_free": 0}
        for i, (kind, address, n_bytes, stream) in enumerate(device["events"])
    ]
    return {"segments": segments, "device_traces": [trace], "allocator_settings": None, "external_annotations": []}


def _segment(start: int, n_bytes: int, stream: int, inside: list[CachedBlock]) -> dict[str, Any]:
    kind = "small" if inside[0].pool.is_small else "large"
    entry = {"device": 0, "address": start, "total_size": n_bytes, "stream": stream, "segment_type": kind}
    return entry | {"segment_pool_id": (0, 0), "blocks": [_block(block) for block in inside]}


def _block(cached: CachedBlock) -> dict[str, Any]:
    state = "inactive" if cached.request_bytes is None else "active_allocated"
    return block(cached.address, cached.n_bytes, cached.request_bytes or 0, state)


def histories_of(read: Snapshot) -> tuple[DeviceHistory, ...]:
    """The figures of each device."""
    return tuple(device_history(device, read.options)[0] for device in read.devices)


def block(address: int, size: int, request: int = 0, state: str = "active_allocated") -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": request or size, "state": state, "frames": []}


def event(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": []}


def small_document() -> dict[str, Any]:
    """A block of 3 MiB that lived before, one of 4 MiB that takes its place, and a refused request."""
    segment = {
        "device": 0, "address": BASE, "total_size": 20 * MIB, "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "allocated_size": 4 * MIB, "active_size": 4 * MIB,
        "blocks": [block(BASE, 4 * MIB), block(BASE + 4 * MIB, 16 * MIB, state="inactive")],
    }  # fmt: skip
    events = [
        event("free_requested", BASE, 3 * MIB - 4),
        event("free_completed", BASE, 3 * MIB - 4),
        event("alloc", BASE, 4 * MIB),
        event("oom", 0, 30 * MIB) | {"device_free": MIB},
    ]
    settings = {"max_split_size": -1, "expandable_segments": False, "roundup_power2_divisions": {"1": 0, "2": 0}}
    return {"segments": [segment], "device_traces": [events], "allocator_settings": settings}


def _grow_older_block(allocator: CachingAllocator, address: int) -> int:
    """A recorded address inside a free block shows that the used block before it keeps a rest: 1 if it was so."""
    if address in allocator.blocks:
        return 0
    around = max((start for start in allocator.blocks if start < address), default=0)
    free = allocator.blocks.get(around)
    older: CachedBlock | None = free.previous if free is not None else None
    if free is None or older is None or address >= around + free.n_bytes:
        return 0
    if not free.is_free or not 0 < address - around <= SMALL_REQUEST:
        return 0
    free.pool.discard(free)
    del allocator.blocks[free.address]
    rest = address - free.address
    older.n_bytes, allocator.allocated_bytes = older.n_bytes + rest, allocator.allocated_bytes + rest
    free.address, free.n_bytes = address, free.n_bytes - rest
    allocator.blocks[address] = free
    free.pool.add(free)
    return 1


def framed_document() -> dict[str, Any]:
    """Requests with frames: 9 MiB in forward, 3 in autograd's thread, a recompute in their place, an optimizer."""
    site = "/env/site-packages/torch"
    call = {"filename": f"{site}/nn/modules/module.py", "line": 9, "name": "_call_impl"}
    linear = {"filename": f"{site}/nn/modules/linear.py", "line": 125, "name": "forward"}
    net = {"filename": "/home/a/gpt/block.py", "line": 31, "name": "forward"}
    train = {"filename": "/home/a/train.py", "line": 7, "name": "step"}
    rerun = {"filename": f"{site}/utils/checkpoint.py", "line": 5, "name": "unpack_hook"}
    adam = {"filename": f"{site}/optim/adam.py", "line": 5, "name": "step"}
    forward = [linear, call, net, call, train]
    steps: list[tuple[str, int, int, int, list[Any]]] = [
        ("segment_alloc", 0, 20, 1, forward),
        ("alloc", 0, 9, 1, forward),
        ("alloc", 9, 3, 6, []),
        ("free_requested", 9, 3, 10, []),
        ("free_completed", 9, 3, 10, []),
        ("alloc", 9, 2, 13, [linear, call, net, call, rerun]),
        ("free_requested", 9, 2, 13, []),
        ("free_completed", 9, 2, 13, []),
        ("alloc", 9, 2, 16, [adam, train]),
    ]
    trace = [
        event(action, BASE + address * MIB, size * MIB) | {"time_us": 100 + time, "frames": frames}
        for action, address, size, time, frames in steps
    ]
    document = small_document()
    blocks = [block(BASE, 9 * MIB), block(BASE + 9 * MIB, 2 * MIB), block(BASE + 11 * MIB, 9 * MIB, state="inactive")]
    document["segments"][0]["blocks"] = blocks
    return document | {"device_traces": [trace]}


class RecordedProgram:
    """A program on our allocator that records its history as torch does: streams, pending frees, refused requests."""

    def __init__(self, seed: int, options: str, capacity: int | None) -> None:
        self.draw, self.options = random.Random(seed), parse_options(options)
        self.allocator = CachingAllocator(capacity, self.options)
        self.events: list[dict[str, Any]] = []
        self.live: list[CachedBlock] = []
        self.pending: list[CachedBlock] = []
        self.counters: list[tuple[int, int, int]] = [(0, 0, 0)]
        """Requested, allocated and reserved bytes before the first event and after each."""

    def act(self, n: int) -> None:
        for _ in range(n):
            chance, mapped = self.draw.random(), self._mapped()
            if self.live and chance < 0.45:
                self._free()
            elif self.pending and chance < 0.55:
                self._complete(self.pending.pop(self.draw.randrange(len(self.pending))))
            elif chance < 0.58:
                self.allocator.empty_cache()
                self._note_driver(mapped)
            else:
                self._allocate(int(2 ** self.draw.uniform(0, 27)), mapped)

    def _allocate(self, n_bytes: int, mapped: dict[int, int]) -> None:
        try:
            block = self.allocator.allocate(n_bytes, self.draw.randrange(2))
        except OutOfCardMemory:
            self._note_driver(mapped)
            self._note(event("oom", 0, n_bytes) | {"device_free": 0})
            return
        self.live.append(block)
        self._note_driver(mapped)
        self._note(event("alloc", block.address, n_bytes), n_bytes, block.n_bytes)

    def _free(self) -> None:
        block = self.live.pop(self.draw.randrange(len(self.live)))
        self.pending.append(block)
        self._note(event("free_requested", block.address, block.request_bytes or 0), 0, -block.n_bytes)
        if self.draw.random() < 0.8:
            self._complete(self.pending.pop())

    def _complete(self, block: CachedBlock) -> None:
        n_bytes, address = block.request_bytes or 0, block.address
        self.allocator.release(block)
        self._note(event("free_completed", address, n_bytes), -n_bytes)

    def _mapped(self) -> dict[int, int]:
        """Bytes of each segment, or of each stretch of mapped blocks, by address."""
        if not self.options.expandable_segments:
            return dict(self.allocator.segments)
        stretches: dict[int, int] = {}
        last = 0
        for block in sorted(self.allocator.blocks.values(), key=lambda block: block.address):
            if block.mapped and last in stretches and last + stretches[last] == block.address:
                stretches[last] += block.n_bytes
            elif block.mapped:
                last, stretches[block.address] = block.address, block.n_bytes
        return stretches

    def _note_driver(self, before: dict[int, int]) -> None:
        taken, returned, pieces = "segment_alloc", "segment_free", dict.items
        if self.options.expandable_segments:
            taken, returned, pieces = "segment_map", "segment_unmap", pages
        was, now = set(pieces(before)), set(pieces(self._mapped()))
        for address, n_bytes in sorted(was - now):
            self._note(event(returned, address, n_bytes), reserved=-n_bytes)
        for address, n_bytes in sorted(now - was):
            self._note(event(taken, address, n_bytes), reserved=n_bytes)

    def _note(self, entry: dict[str, Any], requested: int = 0, allocated: int = 0, reserved: int = 0) -> None:
        """Adds an event, and what it changes in the counters."""
        self.events.append(entry)
        before = self.counters[-1]
        self.counters.append((before[0] + requested, before[1] + allocated, before[2] + reserved))

    def document(self, *, cut: int) -> dict[str, Any]:
        """The snapshot without its first `cut` events, as when torch's buffer is full."""
        segments, waiting = [], {block.address for block in self.pending}
        blocks = sorted(self.allocator.blocks.values(), key=lambda block: block.address)
        for start, n_bytes in sorted(self._mapped().items()):
            inside = [block for block in blocks if start <= block.address < start + n_bytes]
            stream = next(key[0] for key, pool in self.allocator.pools.items() if pool is inside[0].pool)
            entry = _segment(start, n_bytes, stream, inside) | {"is_expandable": self.options.expandable_segments}
            for block in entry["blocks"]:
                if block["address"] in waiting:
                    block["state"] = "active_pending_free"
            segments.append(entry)
        settings = {
            "expandable_segments": self.options.expandable_segments,
            "max_split_size": self.options.max_split_bytes or -1,
            "roundup_power2_divisions": {str(1 << power): n for power, n in enumerate(self.options.divisions)},
        }
        return {"segments": segments, "device_traces": [self.events[cut:]], "allocator_settings": settings}


def pages(stretches: dict[int, int]) -> set[tuple[int, int]]:
    """Pages of 2 MiB, as (address, bytes)."""
    return {(a, 2 * MIB) for start, n in stretches.items() for a in range(start, start + n, 2 * MIB)}
