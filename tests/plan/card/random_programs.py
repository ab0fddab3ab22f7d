"""Random programs of requests and frees: played by our allocator, or run by torch's on the card of this process.

python -m tests.plan.card.random_programs SEED COUNT     every program on torch's own allocator, one JSON line each

An operation is `["take", bytes, stream]`, `["free", index]` or `["empty"]`. A program's answer has, for each operation,
the place of the block (number of its segment, offset in it) and the bytes reserved afterwards.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

from explorer.plan.card.allocator_options import parse_options
from explorer.plan.card.caching_allocator import CachedBlock, CachingAllocator, OutOfCardMemory
from explorer.plan.card.cards import capacity_bytes
from explorer.record.card import Card

N_OPERATIONS = 80
Operation = list[Any]
Answer = list[list[int] | str]


def programs(seed: int, count: int) -> Iterator[list[Operation]]:
    """Programs of small, middle and large requests; some fill the card, some have a second stream."""
    for number in range(count):
        chance = random.Random(1000 * seed + number)
        most = chance.choice((12, 22, 26, 31, 33))
        streams = chance.choice((1, 1, 2))
        alive: list[int] = []
        program: list[Operation] = []
        for index in range(N_OPERATIONS):
            kind = chance.random()
            if kind < 0.02:
                program.append(["empty"])
            elif alive and kind < 0.45:
                program.append(["free", alive.pop(chance.randrange(len(alive)))])
            else:
                size = int(2 ** chance.uniform(0, most)) if chance.random() < 0.8 else 1 << chance.randrange(most)
                program.append(["take", max(1, size), chance.randrange(streams)])
                alive.append(index)
        yield program


def played(program: list[Operation], card: Card) -> Answer:
    """The answer of our allocator."""
    options = parse_options(card.options)
    allocator = CachingAllocator(capacity_bytes(card), options, total_bytes=card.total_bytes)
    blocks: dict[int, CachedBlock] = {}
    answer: Answer = []
    starts: dict[int, int] = {}
    for index, (kind, *values) in enumerate(program):
        place = [-1, 0]
        if kind == "empty":
            allocator.empty_cache()
        elif kind == "free" and values[0] in blocks:
            allocator.release(blocks.pop(values[0]))
        elif kind == "take":
            try:
                block = blocks[index] = allocator.allocate(*values)
                place = [starts.setdefault(block.start, len(starts)), block.address - block.start]
            except OutOfCardMemory:
                place = [-2, 0]
        answer.append([*place, allocator.reserved_bytes])
    return answer


def run(program: list[Operation]) -> Answer:
    """The answer of torch's allocator."""
    import torch

    side = torch.cuda.Stream()
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(max_entries=100_000, context=None, stacks="python", clear_history=True)
    blocks: dict[int, tuple[int, bool]] = {}
    answer: Answer = []
    for index, (kind, *values) in enumerate(program):
        address = -1
        if kind == "empty":
            torch.cuda.empty_cache()
        elif kind == "free" and values[0] in blocks:
            torch.cuda.caching_allocator_delete(blocks.pop(values[0])[0])
        elif kind == "take":
            try:
                stream = side if values[1] else torch.cuda.current_stream()
                address = torch.cuda.caching_allocator_alloc(values[0], stream=stream)
                blocks[index] = address, bool(values[1])
            except torch.OutOfMemoryError:
                address = -2
        answer.append([address, 0, torch.cuda.memory_reserved()])
    for address, _ in blocks.values():
        torch.cuda.caching_allocator_delete(address)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return _with_places(answer, trace)


def _with_places(answer: Answer, trace: list[dict[str, Any]]) -> Answer:
    """Addresses as segment and offset. An expandable segment has one range of addresses, an eighth above
    the card's memory."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    ranges: list[tuple[int, int]] = []
    segments: dict[int, int] = {}
    for event in trace:
        if event["action"] == "segment_alloc":
            ranges.append((event["addr"], event["size"]))
        elif event["action"] == "segment_map" and not any(a <= event["addr"] < a + n for a, n in ranges):
            ranges.append((event["addr"], total + total // 8))
    out: Answer = []
    for address, _, reserved in answer:  # type: ignore[misc]
        place = [address, 0]
        for start, n_bytes in ranges:
            if start <= address < start + n_bytes:
                place = [segments.setdefault(start, len(segments)), address - start]
        out.append([*place, reserved])
    return out


if __name__ == "__main__":
    for program in programs(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(run(program)), flush=True)
