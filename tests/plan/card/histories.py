"""Allocator histories of real GPUs, from public repositories: tests/golden/cuda_histories, origin in each file.

`replay` plays one through our allocator: requests, frees and returned segments are those of the history, the address of
a new segment too; which block a request takes, and when the driver is asked, is the allocator's own doing.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from explorer.plan.card.caching_allocator import SMALL_REQUEST, CachedBlock, CachingAllocator

FILES = sorted((Path(__file__).resolve().parents[2] / "golden" / "cuda_histories").glob("*.json.gz"))


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


def devices(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") as text:
        loaded: list[dict[str, Any]] = json.load(text)["devices"]
    return loaded


def opening(device: dict[str, Any], allocator: CachingAllocator) -> None:
    """The segments and blocks that were there before the first event."""
    used = sorted(device["first_blocks"])
    addresses = [address for address, *_ in used]
    for start, n_bytes, stream, small in device["first_segments"]:
        inside = used[bisect_right(addresses, start - 1) : bisect_right(addresses, start + n_bytes - 1)]
        allocator.adopt(start, _pieces(start, start + n_bytes, inside), allocator.pool(stream, is_small=bool(small)))


def _pieces(address: int, end: int, used: list[list[int]]) -> Iterator[tuple[int, bool]]:
    for start, n_bytes, *_ in used:
        if start > address:
            yield start - address, False
        yield n_bytes, True
        address = start + n_bytes
    if end > address:
        yield end - address, False


def replay(device: dict[str, Any]) -> Replay:
    outcome = Replay()
    calls: deque[tuple[int, int]] = deque()

    def recorded_address(n_bytes: int) -> int:
        if calls and calls[0][1] == n_bytes:
            return calls.popleft()[0]
        outcome.invented += 1
        return -outcome.invented << 40

    allocator = CachingAllocator(new_address=recorded_address)
    opening(device, allocator)
    used = {address: block for address, block in allocator.blocks.items() if block.request_bytes is not None}
    kinds = device["kinds"]
    for kind, address, n_bytes, stream in device["events"]:
        match kinds[kind]:
            case "segment_alloc":
                calls.append((address, n_bytes))
            case "segment_free":
                allocator.release_segment(address)
            case "free_completed":
                allocator.release(used.pop(address))
            case "alloc":
                outcome.n_requests += 1
                outcome.older += _grow_older_block(allocator, address)
                block = used[address] = allocator.allocate(n_bytes, stream)
                if block.address != address:
                    outcome.wrong.append((address, block.address))
    ends = {address: n_bytes for address, n_bytes, *_ in device["last_segments"]}
    outcome.same_end = ends == allocator.segments and not calls
    return outcome


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
