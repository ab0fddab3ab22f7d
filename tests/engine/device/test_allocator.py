"""Totals: what the allocator said is paired, bounded and summed the same way on both devices."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from explorer.engine.device.allocator import AllocatorLog, clock_skew_ns, lifetimes, peak_bytes, take_probe
from explorer.engine.device.cpu_allocator import CpuRecorder

CPU = torch.device("cpu")


def log_of(events: list[tuple[int, int]], base_bytes: int | None = None) -> AllocatorLog:
    """Events (pointer, bytes) one nanosecond apart."""
    columns = np.array(events, dtype=np.int64).reshape(-1, 2)
    return AllocatorLog(
        time_ns=np.arange(len(columns)), pointer=columns[:, 0], n_bytes=columns[:, 1], base_bytes=base_bytes
    )


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, int]]:
    """What a real allocator may say: pointers are handed out again, some frees belong to older blocks."""
    alive: dict[int, int] = {}
    events = []
    for _ in range(draw(st.integers(0, 60))):
        pointer = draw(st.integers(1, 8))
        if pointer in alive:
            events.append((pointer, -alive.pop(pointer)))
        elif draw(st.booleans()):
            alive[pointer] = draw(st.integers(1, 100))
            events.append((pointer, alive[pointer]))
        else:
            events.append((pointer, -draw(st.integers(1, 100))))
    return events


@given(histories())
def test_lifetimes_pair_each_allocation_with_its_own_free(events: list[tuple[int, int]]) -> None:
    lived = lifetimes(log_of(events))
    alive: dict[int, int] = {}
    expected, older = {}, []
    for i, (pointer, n_bytes) in enumerate(events):
        if n_bytes > 0:
            alive[pointer] = i
            expected[i] = len(events)
        elif pointer in alive:
            expected[alive.pop(pointer)] = i
        else:
            older.append(i)
    assert dict(zip(lived.born.tolist(), lived.died.tolist())) == expected
    assert lived.older_frees.tolist() == older


@given(histories(), st.integers(0, 10_000))
def test_peak_is_the_running_maximum(events: list[tuple[int, int]], base: int) -> None:
    assert peak_bytes(log_of(events, base), base) == base + max(
        0, max(np.cumsum([n for _, n in events]).tolist(), default=0)
    )


def test_a_free_of_an_older_block_does_not_sink_the_cpu_total() -> None:
    assert peak_bytes(log_of([(1, -500), (2, 300)]), 1000) == 1300


def test_an_allocation_where_one_is_alive_ends_the_older_one() -> None:
    lived = lifetimes(log_of([(1, 10), (1, 20)]))
    assert (lived.born.tolist(), lived.died.tolist()) == ([0, 1], [1, 2])


def test_the_probe_tells_the_clocks_apart() -> None:
    with CpuRecorder() as recorder:
        probe = take_probe(CPU)
    skew_ns = clock_skew_ns(recorder.log, (probe,))
    assert abs(skew_ns) < 1_000_000
    shifted = AllocatorLog(
        time_ns=recorder.log.time_ns + 7_000_000, pointer=recorder.log.pointer, n_bytes=recorder.log.n_bytes
    )
    assert clock_skew_ns(shifted, (probe,)) == skew_ns + 7_000_000
