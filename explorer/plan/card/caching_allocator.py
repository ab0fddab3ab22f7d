"""torch's native caching allocator for CUDA memory, played with numbers instead of memory.

The allocator takes segments from the driver and hands out blocks of them. Rules, cited by number in the code:

1. A request is rounded up to a multiple of 512 bytes, or to a division of a power of two if that option is set.
2. Requests up to 1 MiB and larger requests have pools of their own, and each stream has both.
3. A request takes the smallest free block that is large enough; of equal blocks the one with the lowest address.
4. In a small pool, a rest of 512 bytes is split off; in a large pool, a rest of more than 1 MiB. A smaller rest stays
   with the block.
5. A new segment has 2 MiB in a small pool, 20 MiB for requests below 10 MiB, and else a multiple of 2 MiB.
6. A free block merges with the free blocks beside it.
7. If the driver refuses a segment, the segments without a used block return to it, and it is asked again.
8. `max_split_size`: larger blocks are never split, serve only requests of nearly their size, and return to the driver
   first.
9. `expandable_segments`: each pool has one range of addresses that grows and shrinks by pages of 2 or 20 MiB.

The garbage collection of cached blocks by their age is not played: without a limit on the process it never runs.
Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.11, and "Memory management" in torch's notes on CUDA semantics.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field

from explorer.plan.card.allocator_options import MIB, AllocatorOptions

SMALL_REQUEST = 1 * MIB
SMALL_SEGMENT = 2 * MIB
MIDDLE_REQUEST = 10 * MIB
MIDDLE_SEGMENT = 20 * MIB
LARGE_GRAIN = 2 * MIB
MAX_SLACK = 20 * MIB
"""A block above `max_split_size` serves a request that is smaller by less than this."""
FIRST_ADDRESS = 1 << 40


class OutOfCardMemory(Exception):
    """The driver has no memory for a request. `n_bytes` is the request, as torch's message names it."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__(n_bytes)
        self.n_bytes = n_bytes


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A stretch of a segment: in use, free, or (in an expandable segment) without memory behind it."""

    address: int
    n_bytes: int
    pool: Pool
    request_bytes: int | None = None
    """None: free."""
    mapped: bool = True
    start: int = 0
    """Address of the segment."""
    previous: CachedBlock | None = None
    next: CachedBlock | None = None

    @property
    def is_free(self) -> bool:
        return self.request_bytes is None and self.mapped

    @property
    def is_whole_segment(self) -> bool:
        return self.previous is None and self.next is None


@dataclass(eq=False, slots=True)
class Pool:
    """Free blocks of one stream for small or for large requests, in the order in which they are chosen (rule 3)."""

    is_small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    """(bytes, address), ascending."""
    unmapped: list[int] = field(default_factory=list)
    """Addresses of blocks without memory, ascending (rule 9)."""

    def add(self, block: CachedBlock) -> None:
        insort(self.free, (block.n_bytes, block.address))

    def discard(self, block: CachedBlock) -> None:
        del self.free[bisect_left(self.free, (block.n_bytes, block.address))]

    @property
    def page_bytes(self) -> int:
        return SMALL_SEGMENT if self.is_small else MIDDLE_SEGMENT


@dataclass(eq=False)
class CachingAllocator:
    """Counters are bytes: `requested` by tensors, `allocated` in blocks, `reserved` from the driver."""

    capacity_bytes: int | None = None
    """What the driver can give; None: no limit."""
    options: AllocatorOptions = AllocatorOptions()
    new_address: Callable[[int], int] | None = None
    """Address of a new segment of so many bytes; None: ascending addresses. A replay names the recorded ones."""
    total_bytes: int | None = None
    """Memory of the card, which decides how many addresses an expandable segment has; None: as the capacity."""
    requested_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    segments: dict[int, int] = field(default_factory=dict)
    """Bytes by address. The range of an expandable segment is not listed."""
    blocks: dict[int, CachedBlock] = field(default_factory=dict)
    """Every block by address."""
    pools: dict[tuple[int, bool], Pool] = field(default_factory=dict)
    """By stream, and whether for small requests."""
    _next_address: int = FIRST_ADDRESS
    _rounded: dict[int, int] = field(default_factory=dict)
    """Bytes of the block that a request needs, by request: a step asks for few sizes, again and again."""

    def allocate(self, n_bytes: int, stream: int = 0) -> CachedBlock:
        """A block for a request of `n_bytes` above 0. Raises OutOfCardMemory."""
        size = self._rounded.get(n_bytes)
        if size is None:
            size = self._rounded[n_bytes] = self.options.rounded(n_bytes)
        pool = self.pools.get((stream, size <= SMALL_REQUEST)) or self.pool(stream, is_small=size <= SMALL_REQUEST)
        block = self._fitting(pool, size) or self._grown(pool, size)
        if block is None and self.options.max_split_bytes is not None and self._release_oversize(pool, size):
            block = self._grown(pool, size)
        if block is None:
            self.empty_cache()
            block = self._grown(pool, size)
        if block is None:
            raise OutOfCardMemory(n_bytes)
        if self.options.is_split(size, block.n_bytes - size, is_small=pool.is_small):
            pool.add(self._split(block, size))
        block.request_bytes = n_bytes
        self.requested_bytes += n_bytes
        self.allocated_bytes += block.n_bytes
        return block

    def release(self, block: CachedBlock) -> None:
        """Frees a block that `allocate` returned; its memory stays in the cache (rule 6)."""
        assert block.request_bytes is not None
        self.requested_bytes -= block.request_bytes
        self.allocated_bytes -= block.n_bytes
        block.request_bytes = None
        block.pool.add(self._merged(block))

    def empty_cache(self) -> None:
        """Returns what no block uses to the driver: whole segments, and whole pages of expandable segments."""
        for pool in self.pools.values():
            for _, address in list(pool.free):
                block = self.blocks[address]
                if address in self.segments and block.is_whole_segment:
                    self.release_segment(address)
                elif self.options.expandable_segments:
                    self._unmap(block)

    def release_segment(self, address: int) -> None:
        """Returns a segment that is one free block."""
        block = self.blocks.pop(address)
        block.pool.discard(block)
        self.reserved_bytes -= self.segments.pop(address)

    def pool(self, stream: int, *, is_small: bool) -> Pool:
        key = (stream, is_small)
        if key not in self.pools:
            self.pools[key] = Pool(is_small)
        return self.pools[key]

    def _fitting(self, pool: Pool, size: int) -> CachedBlock | None:
        """The free block that serves a request of `size`, taken out of its pool; None: there is none (rules 3, 8)."""
        at = bisect_left(pool.free, (size, 0))
        if at == len(pool.free):
            return None
        if self.options.expandable_segments:
            at = self._least_growth(pool, at)
        n_bytes, address = pool.free[at]
        largest = self.options.max_split_bytes
        if largest is not None and (size < largest <= n_bytes or (size >= largest and n_bytes >= size + MAX_SLACK)):
            return None
        del pool.free[at]
        return self.blocks[address]

    def _least_growth(self, pool: Pool, at: int) -> int:
        """In an expandable segment a block counts with the unmapped block behind it, to which it can grow (rule 9)."""

        def reach(index: int) -> int:
            block = self.blocks[pool.free[index][1]]
            after = block.next
            return block.n_bytes + (after.n_bytes if after is not None and not after.mapped else 0)

        while at + 1 < len(pool.free) and reach(at + 1) < reach(at):
            at += 1
        return at

    def _grown(self, pool: Pool, size: int) -> CachedBlock | None:
        """A free block made of new memory; None: the driver refuses (rule 5)."""
        if self.options.expandable_segments:
            return self._expanded(pool, size)
        n_bytes = segment_bytes(size)
        if not self._driver_has(n_bytes):
            return None
        address = self._address(n_bytes)
        self.segments[address] = n_bytes
        self.reserved_bytes += n_bytes
        block = self.blocks[address] = CachedBlock(address, n_bytes, pool, start=address)
        return block

    def _driver_has(self, n_bytes: int) -> bool:
        return self.capacity_bytes is None or self.reserved_bytes + n_bytes <= self.capacity_bytes

    def _address(self, n_bytes: int) -> int:
        if self.new_address is not None:
            return self.new_address(n_bytes)
        address = self._next_address
        self._next_address += -(-n_bytes // MIDDLE_SEGMENT) * MIDDLE_SEGMENT
        return address

    def _split(self, block: CachedBlock, size: int) -> CachedBlock:
        """Cuts a block after `size` bytes. Returns the new block behind it, which is in no pool yet."""
        address, after = block.address + size, block.next
        rest = CachedBlock(address, block.n_bytes - size, block.pool, None, block.mapped, block.start, block, after)
        if after is not None:
            after.previous = rest
        block.next, block.n_bytes = rest, size
        self.blocks[address] = rest
        return rest

    def _merged(self, block: CachedBlock) -> CachedBlock:
        """A free block joined with the free blocks beside it, which leave their pool; it is in no pool yet."""
        before, after = block.previous, block.next
        if after is not None and after.request_bytes is None and after.mapped:
            after.pool.discard(after)
            self._absorb(block, after)
        if before is not None and before.request_bytes is None and before.mapped:
            before.pool.discard(before)
            self._absorb(before, block)
            return before
        return block

    def _absorb(self, block: CachedBlock, after: CachedBlock) -> None:
        del self.blocks[after.address]
        block.n_bytes += after.n_bytes
        block.next = after.next
        if after.next is not None:
            after.next.previous = block

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Returns blocks above `max_split_size`, the largest first, until one request of `size` fits (rule 8)."""
        assert self.options.max_split_bytes is not None
        least = max(size, self.options.max_split_bytes)
        at = bisect_left(pool.free, (least, 0))
        whole = [pool.free[at]] if at < len(pool.free) else pool.free[::-1]
        returned = 0
        for n_bytes, address in whole:
            if returned >= least or n_bytes < self.options.max_split_bytes:
                break
            if self.blocks[address].is_whole_segment and address in self.segments:
                self.release_segment(address)
                returned += n_bytes
        return returned >= least

    def _expanded(self, pool: Pool, size: int) -> CachedBlock | None:
        """A block of at least `size` bytes at the end of mapped memory, taken out of its pool (rule 9)."""
        block = self._room(pool, size)
        while not block.mapped or block.n_bytes < size:
            target = block if not block.mapped else _next(block)
            have = block.n_bytes if block.mapped else 0
            mapped = self._map(target, min(target.n_bytes, size - have))
            if mapped is None:
                return None
            block = mapped
        pool.discard(block)
        return block

    def _room(self, pool: Pool, size: int) -> CachedBlock:
        """The lowest unmapped block that has `size` bytes with its neighbours, or the free block before it."""
        for address in pool.unmapped:
            block = self.blocks[address]
            first = block.previous if block.previous is not None and block.previous.is_free else block
            room = 0
            after: CachedBlock | None = first
            while after is not None and after.request_bytes is None and room < size:
                room, after = room + after.n_bytes, after.next
            if room >= size:
                return first
        n_bytes = self.options.address_range_bytes(self.total_bytes or self.capacity_bytes, size)
        address = self._address(n_bytes)
        block = self.blocks[address] = CachedBlock(address, n_bytes, pool, mapped=False, start=address)
        insort(pool.unmapped, address)
        return block

    def _map(self, block: CachedBlock, n_bytes: int) -> CachedBlock | None:
        """Puts memory behind whole pages of an unmapped block; the free block that results. None: refused."""
        page = block.pool.page_bytes
        n_bytes = min(-(-n_bytes // page) * page, block.n_bytes)
        if not self._driver_has(n_bytes):
            return None
        block.pool.unmapped.remove(block.address)
        if n_bytes < block.n_bytes:
            self._split(block, n_bytes)
            insort(block.pool.unmapped, _next(block).address)
        block.mapped = True
        self.reserved_bytes += n_bytes
        block = self._merged(block)
        block.pool.add(block)
        return block

    def _unmap(self, block: CachedBlock) -> None:
        """Returns the whole pages inside a free block of an expandable segment."""
        page = block.pool.page_bytes
        first = block.start - (block.start - block.address) // page * page
        end = block.start + (block.address + block.n_bytes - block.start) // page * page
        if end <= first:
            return
        block.pool.discard(block)
        if first > block.address:
            self._split(block, first - block.address)
            block.pool.add(block)
            block = _next(block)
        if end < block.address + block.n_bytes:
            self._split(block, end - block.address)
            block.pool.add(_next(block))
        block.mapped = False
        self.reserved_bytes -= block.n_bytes
        for beside in (block.next, block.previous):
            if beside is not None and not beside.mapped:
                block.pool.unmapped.remove(beside.address)
                left, right = (beside, block) if beside.address < block.address else (block, beside)
                self._absorb(left, right)
                block = left
        if block.is_whole_segment:  # its addresses return to the driver, too
            del self.blocks[block.address]
        else:
            insort(block.pool.unmapped, block.address)


def segment_bytes(size: int) -> int:
    """Bytes of a new segment for a rounded request (rule 5)."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return MIDDLE_SEGMENT if size < MIDDLE_REQUEST else -(-size // LARGE_GRAIN) * LARGE_GRAIN


def _next(block: CachedBlock) -> CachedBlock:
    assert block.next is not None
    return block.next
