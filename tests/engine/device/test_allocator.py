"""Events of an allocator: paired, bounded and summed the same way on both devices, and complete on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._profiler import _EventType
from torch.profiler import record_function

from explorer.engine.device import allocator
from explorer.engine.device.allocator import (
    EMPTY,
    AllocatorLog,
    CpuRecorder,
    clock_skew_ns,
    lifetimes,
    peak_bytes,
    take_probe,
)

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


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_cpu_recorder_sees_exactly_what_was_allocated(sizes: list[int]) -> None:
    with CpuRecorder() as recorder:
        kept = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        pointers = [block.data_ptr() for block in kept]
    born = lifetimes(recorder.log).born
    seen = dict(zip(recorder.log.pointer[born].tolist(), recorder.log.n_bytes[born].tolist()))
    assert [seen[pointer] for pointer in pointers] == sizes


def test_cpu_recorder_keeps_what_it_has_after_an_exception() -> None:
    recorder = CpuRecorder()
    with pytest.raises(ValueError, match="in the step"), recorder:
        kept = torch.empty(12_345, dtype=torch.uint8)
        raise ValueError("in the step")
    assert kept.numel() in recorder.log.n_bytes.tolist()


def test_the_recorder_says_nothing_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with CpuRecorder():
        torch.ones(3)
    assert capfd.readouterr().err == ""


def test_ranges_that_somebody_opens_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one that outlasts its recording would be written to freed memory."""
    tags: list[Any] = []

    def read(recorded: Any) -> AllocatorLog:
        todo = list(recorded.experimental_event_tree())
        while todo:
            event = todo.pop()
            tags.append(event.tag)
            todo.extend(event.children)
        return AllocatorLog(time_ns=EMPTY, pointer=EMPTY, n_bytes=EMPTY)

    monkeypatch.setattr(allocator, "_read", read)
    with CpuRecorder(), record_function("Optimizer.step"):
        torch.ones(64).exp()
    assert set(tags) == {_EventType.Allocation}
