"""The allocator places every block of real histories where the GPU had it, and keeps its books whatever is asked."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import BadInput
from explorer.plan.card.allocator_options import MIB, AllocatorOptions, parse_options
from explorer.plan.card.caching_allocator import CachingAllocator, OutOfCardMemory, segment_bytes
from tests.plan.card.histories import FILES, GOLDEN, devices, document, file_named, replay, replays

OPTIONS = (
    "",
    "max_split_size_mb:64",
    "roundup_power2_divisions:4",
    "expandable_segments:True",
    "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name[:40])
def test_every_block_and_segment_lies_where_the_gpu_had_it(file: Path) -> None:
    for _, outcome in replays(file):
        assert outcome.n_requests > 400
        assert not outcome.wrong
        assert not outcome.invented
        assert outcome.same_end
        assert outcome.older <= 3


def test_another_choice_of_blocks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 4 with half of its limit: the histories disagree."""
    monkeypatch.setattr("explorer.plan.card.caching_allocator.SMALL_REQUEST", MIB // 2)
    assert any(replay(device).wrong for device in devices(file_named("medium_128_training")))


WHOLE = [file for file in FILES if file.name.startswith(("h200", "imaginary"))]
"""Processes from their first request: of a real H200, torch 2.11, and of an imaginary H100, torch 2.13."""


@pytest.mark.parametrize("file", WHOLE, ids=lambda file: file.name[:40])
def test_the_peaks_of_a_whole_process_are_those_that_torch_counted(file: Path) -> None:
    """Requested, allocated and reserved; ranks of FSDP2 free what another stream still reads."""
    ((_, outcome),) = replays(file)
    peaks = document(file)["step_peaks"]
    assert bool(peaks) != ("refused" in file.name)
    assert not peaks or outcome.peaks == tuple(map(max, *peaks))


@pytest.mark.parametrize("name", ["h200/gpt-kept", "h200/gpt-recomputed", "h200/refused", "imaginary/gpt-recomputed"])
def test_an_expandable_segment_grows_by_the_pages_that_the_gpu_mapped(name: str) -> None:
    """Reserved bytes at every request of a real H200 and of an imaginary H100, and the refused request."""
    recorded = document(GOLDEN / f"{name}-expandable.json.gz")
    options = parse_options("expandable_segments:True")
    allocator = CachingAllocator(recorded["limit_bytes"] or None, options)
    (device,) = recorded["devices"]
    live, mapped, peaks, n_refused = {}, 0, (0, 0, 0), 0
    for kind, address, n_bytes, stream in device["events"]:
        match device["kinds"][kind]:
            case "segment_map":
                mapped += n_bytes
            case "segment_unmap":
                mapped -= n_bytes
            case "alloc":
                live[address] = allocator.allocate(n_bytes, stream)
                assert allocator.reserved_bytes == mapped
                sums = allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes
                peaks = tuple(map(max, peaks, sums))
            case "free_completed":
                allocator.release(live.pop(address))
            case "oom":
                n_refused += 1
                with pytest.raises(OutOfCardMemory):
                    allocator.allocate(n_bytes, stream)
    assert n_refused == ("refused" in name)
    assert not recorded["step_peaks"] or list(peaks) == recorded["step_peaks"][-1]


def books_balance(allocator: CachingAllocator) -> None:
    """No overlap, sums that agree, pools that list what is free, and no two free neighbours."""
    blocks = sorted(allocator.blocks.values(), key=lambda block: block.address)
    assert all(a.address + a.n_bytes <= b.address for a, b in zip(blocks, blocks[1:]))
    assert sum(block.n_bytes for block in blocks if block.mapped) == allocator.reserved_bytes
    used = [block for block in blocks if block.request_bytes is not None]
    assert sum(block.n_bytes for block in used) == allocator.allocated_bytes
    assert sum(block.request_bytes or 0 for block in used) == allocator.requested_bytes
    pools = allocator.pools.values()
    assert sorted((b.n_bytes, b.address) for b in blocks if b.is_free) == sorted(e for p in pools for e in p.free)
    assert sorted(b.address for b in blocks if not b.mapped) == sorted(a for p in pools for a in p.unmapped)
    assert not [b for b in blocks if b.is_free and b.next is not None and b.next.is_free]
    if allocator.capacity_bytes is not None:
        assert allocator.reserved_bytes <= allocator.capacity_bytes


@given(
    seed=st.integers(0, 2**32), options=st.sampled_from(OPTIONS), capacity_mib=st.one_of(st.none(), st.integers(1, 600))
)
def test_the_books_balance_whatever_is_asked(seed: int, options: str, capacity_mib: int | None) -> None:
    capacity = None if capacity_mib is None else capacity_mib * MIB
    allocator = CachingAllocator(capacity, parse_options(options))
    draw, live = random.Random(seed), []
    for _ in range(60):
        if live and draw.random() < 0.45:
            allocator.release(live.pop(draw.randrange(len(live))))
        else:
            n_bytes = int(2 ** draw.uniform(0, 28))
            try:
                block = allocator.allocate(n_bytes, draw.randrange(2))
            except OutOfCardMemory as refused:
                assert refused.n_bytes == n_bytes
                assert capacity is not None
                continue
            assert n_bytes <= block.n_bytes
            live.append(block)
    books_balance(allocator)
    for block in live:
        allocator.release(block)
    allocator.empty_cache()
    books_balance(allocator)
    assert allocator.reserved_bytes == allocator.allocated_bytes == 0


def test_memory_is_refused_only_after_the_cache_was_emptied() -> None:
    allocator = CachingAllocator(40 * MIB)
    small = allocator.allocate(30 * MIB)
    allocator.release(small)
    allocator.allocate(36 * MIB)
    assert allocator.reserved_bytes == 36 * MIB
    with pytest.raises(OutOfCardMemory):
        allocator.allocate(8 * MIB)


@pytest.mark.parametrize(
    ("cached_mib", "request_mib", "left_mib"),
    [
        ((40, 70, 100, 120), 200, (40, 70)),  # several, the largest first, until the request has room
        ((40, 70, 100, 120), 76, (40, 70, 120)),  # one that is large enough: the smallest of them
        ((40, 64, 64), 100, (40,)),  # a block of the limit's size counts
        ((64, 64, 64), 128, (64,)),  # just enough is enough
        ((40, 62), 90, ()),  # smaller blocks leave with the whole cache
    ],
)
def test_large_blocks_that_no_request_may_split_are_returned_first(
    cached_mib: tuple[int, ...], request_mib: int, left_mib: tuple[int, ...]
) -> None:
    """Rule 8: `release_available_cached_blocks` of torch's CUDACachingAllocator. The driver has no byte left."""
    allocator = CachingAllocator(sum(cached_mib) * MIB, parse_options("max_split_size_mb:64"))
    for block in [allocator.allocate(n * MIB) for n in cached_mib]:
        allocator.release(block)
    taken = allocator.allocate(request_mib * MIB)
    assert taken.n_bytes == request_mib * MIB
    assert sorted(size // MIB for size in allocator.segments.values()) == sorted((*left_mib, request_mib))


def test_an_expandable_segment_strands_nothing_where_segments_do() -> None:
    """Blocks of growing size: each needs a segment of its own, or grows the one there is."""

    def reserved(options: AllocatorOptions) -> int:
        allocator = CachingAllocator(options=options)
        for n_mib in (24, 44, 64, 84):
            allocator.release(allocator.allocate(n_mib * MIB))
        return allocator.reserved_bytes

    assert reserved(AllocatorOptions()) == (24 + 44 + 64 + 84) * MIB
    assert reserved(AllocatorOptions(expandable_segments=True)) == 100 * MIB


@pytest.mark.parametrize(
    ("request_bytes", "segment"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (21 * MIB, 22)],
)
def test_segments_have_the_sizes_that_torch_asks_for(request_bytes: int, segment: int) -> None:
    assert segment_bytes(AllocatorOptions().rounded(request_bytes)) == segment * MIB


def test_a_request_is_rounded_up_to_a_division_of_a_power_of_two() -> None:
    options = parse_options("roundup_power2_divisions:4")
    assert options.rounded(1200) == 1536  # too small for four divisions of 512 bytes
    assert options.rounded(1200 * MIB) == 1280 * MIB  # 1024, 1280, 1536, 1792: the example of torch's notes
    assert options.rounded(1024 * MIB) == 1024 * MIB
    by_size = parse_options("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert [by_size.rounded(n * MIB) // MIB for n in (200, 600, 1100, 2100)] == [200, 768, 1152, 2304]
    with_a_gap = parse_options("roundup_power2_divisions: [64: 8, 256: 4, 512: 0]")
    assert [with_a_gap.rounded(n * MIB + 512) for n in (33, 65, 129, 257, 513)] == [
        36 * MIB, 72 * MIB, 129 * MIB + 512, 320 * MIB, 513 * MIB + 512
    ]  # fmt: skip


def test_faults_of_the_options_are_named_all_at_once() -> None:
    with pytest.raises(BadInput) as raised:
        parse_options("max_split_size_mb:x,expandable_segments:yes,roundup_power2_divisions:3,backend")
    for name in ("max_split_size_mb", "expandable_segments", "roundup_power2_divisions", "backend"):
        assert name in str(raised.value)
    options = parse_options("backend:native,garbage_collection_threshold:0.8,max_split_size_mb:20")
    assert options.not_played == ("backend:native", "garbage_collection_threshold:0.8")
    assert options.played == ("max_split_size_mb:20",)
