"""Events of the allocators of both devices: recorded completely, paired, bounded and summed the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._profiler import _EventType
from torch.profiler import record_function

from explorer.engine.bench.recording import doubts
from explorer.engine.device import allocator
from explorer.errors import NotOnThisDevice
from tests.plan.card.histories import FILES, block, replays, snapshot

CPU = torch.device("cpu")


def log_of(events: list[tuple[int, int]], base_bytes: int | None = None) -> allocator.AllocatorLog:
    """Events (pointer, bytes) one nanosecond apart."""
    columns = np.array(events, dtype=np.int64).reshape(-1, 2)
    return allocator.AllocatorLog(
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
    lived = allocator.lifetimes(log_of(events))
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
    assert allocator.peak_bytes(log_of(events, base), base) == base + max(
        0, max(np.cumsum([n for _, n in events]).tolist(), default=0)
    )


def test_a_free_of_an_older_block_does_not_sink_the_cpu_total() -> None:
    assert allocator.peak_bytes(log_of([(1, -500), (2, 300)]), 1000) == 1300


def test_an_allocation_where_one_is_alive_ends_the_older_one() -> None:
    lived = allocator.lifetimes(log_of([(1, 10), (1, 20)]))
    assert (lived.born.tolist(), lived.died.tolist()) == ([0, 1], [1, 2])


def test_the_probe_tells_the_clocks_apart() -> None:
    with allocator.CpuRecorder() as recorder:
        probe = allocator.take_probe(CPU)
    skew_ns = allocator.clock_skew_ns(recorder.log, (probe,))
    assert abs(skew_ns) < 1_000_000
    shifted = allocator.AllocatorLog(
        time_ns=recorder.log.time_ns + 7_000_000, pointer=recorder.log.pointer, n_bytes=recorder.log.n_bytes
    )
    assert allocator.clock_skew_ns(shifted, (probe,)) == skew_ns + 7_000_000


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8))
def test_cpu_recorder_sees_exactly_what_was_allocated(sizes: list[int]) -> None:
    with allocator.CpuRecorder() as recorder:
        kept = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        pointers = [block.data_ptr() for block in kept]
    born = allocator.lifetimes(recorder.log).born
    seen = dict(zip(recorder.log.pointer[born].tolist(), recorder.log.n_bytes[born].tolist()))
    assert [seen[pointer] for pointer in pointers] == sizes


def test_cpu_recorder_keeps_what_it_has_after_an_exception() -> None:
    recorder = allocator.CpuRecorder()
    with pytest.raises(ValueError, match="in the step"), recorder:
        kept = torch.empty(12_345, dtype=torch.uint8)
        raise ValueError("in the step")
    assert kept.numel() in recorder.log.n_bytes.tolist()


def test_the_recorder_says_nothing_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with allocator.CpuRecorder():
        torch.ones(3)
    assert capfd.readouterr().err == ""


def test_ranges_that_somebody_opens_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one that outlasts its recording would be written to freed memory."""
    tags: list[Any] = []

    def read(recorded: Any) -> allocator.AllocatorLog:
        todo = list(recorded.experimental_event_tree())
        while todo:
            event = todo.pop()
            tags.append(event.tag)
            todo.extend(event.children)
        return allocator.AllocatorLog(time_ns=allocator.EMPTY, pointer=allocator.EMPTY, n_bytes=allocator.EMPTY)

    monkeypatch.setattr(allocator, "_read", read)
    with allocator.CpuRecorder(), record_function("Optimizer.step"):
        torch.ones(64).exp()
    assert set(tags) == {_EventType.Allocation}


MIB = 2**20
COUNTERS = ("requested", "allocated", "reserved")


def synthetic_entry(action: str, addr: int, size: int, time_us: int, **more: int) -> dict[str, Any]:
    """One TraceEntry as torch.cuda.memory._snapshot documents it; made by hand, not recorded on a GPU."""
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us, "frames": [], **more}


SYNTHETIC_BASE = {
    "requested_bytes.all.current": 1000,
    "allocated_bytes.all.current": 1024,
    "reserved_bytes.all.current": 2 * 2**20,
}


SYNTHETIC_STATS = {
    "requested_bytes.all.current": 410,
    "allocated_bytes.all.current": 1536,
    "reserved_bytes.all.current": 2 * 2**20,
    "requested_bytes.all.peak": 1900,
    "allocated_bytes.all.peak": 2048,
    "reserved_bytes.all.peak": 22 * 2**20,
}


SYNTHETIC_TRACE = [
    ("segment_alloc", 9 * MIB, 20 * 2**20),
    ("alloc", 9 * MIB, 900),
    ("free_requested", 9 * MIB, 900),
    ("free_completed", 9 * MIB, 900),
    ("free_completed", 5 * MIB, 600),
    ("segment_free", 9 * MIB, 20 * 2**20),
    ("alloc", 5 * MIB, 10),
    ("snapshot", 0, 0),
]


def synthetic_snapshot(n_lost: int = 0) -> dict[str, Any]:
    """The trace of GPU 1 without its first events, and the segment that is left."""
    blocks = [block(5 * MIB, 512, 10), block(5 * MIB + 512, 1024, 400), block(5 * MIB + 1536, 2 * MIB - 1536)]
    blocks[2]["state"] = "inactive"
    segment = {"device": 1, "address": 5 * MIB, "total_size": 2 * MIB, "segment_type": "small", "blocks": blocks}
    return {"device_traces": [[], synthetic_trace()[n_lost:]], "segments": [segment]}


def synthetic_trace() -> list[dict[str, Any]]:
    return [synthetic_entry(*entry, i + 1) for i, entry in enumerate(SYNTHETIC_TRACE)]


def test_synthetic_cuda_trace_is_read_to_the_byte() -> None:
    log = allocator.read_trace(synthetic_snapshot(), 1, SYNTHETIC_BASE, SYNTHETIC_STATS)
    assert log.is_complete and doubts(log, 1900) == []
    assert log.n_bytes.tolist() == [900, -900, -600, 10]
    assert log.time_ns.tolist() == [2500, 4500, 5500, 7500]
    assert allocator.peak_bytes(log, log.base_bytes) == log.requested_peak_bytes == 1900
    assert log.allocated is not None and log.allocated.tolist() == [1024, 2048, 1024, 1024, 1536]
    assert log.reserved is not None and log.reserved.tolist() == [2 * MIB, 22 * MIB, 22 * MIB, 22 * MIB, 2 * MIB]
    assert (log.allocated_peak_bytes, log.reserved_peak_bytes) == (2048, 22 * MIB)


def test_synthetic_cuda_refusal_says_what_was_asked_and_free() -> None:
    refused = synthetic_entry("oom", 0, 2**40, 3, device_free=2**30)
    del refused["addr"]
    log = allocator.read_trace({"device_traces": [[refused]], "segments": []}, 0, SYNTHETIC_BASE, SYNTHETIC_STATS)
    assert (log.refusal.asked_bytes, log.refusal.free_bytes) == (2**40, 2**30)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name[:40])
def test_the_curves_of_real_histories_are_those_of_the_allocator(file: Path) -> None:
    """Second method: the allocator plays the requests and chooses every block itself. Not run on CUDA."""
    for device, outcome in replays(file):
        ends = device["last_segments"]  # as the card reported them
        after = {f"{name}_bytes.all.{when}": 0 for name in COUNTERS for when in ("current", "peak")}
        after["allocated_bytes.all.current"] = sum(allocated for _, _, allocated, *_ in ends)
        after["reserved_bytes.all.current"] = sum(n_bytes for _, n_bytes, *_ in ends)
        log = allocator.read_trace(snapshot(device, outcome.allocator), 0, after, after)
        assert log.contradiction == "" and log.allocated is not None and log.reserved is not None
        assert log.allocated.tolist() == [allocated for allocated, _ in outcome.curve]
        assert log.reserved.max() == outcome.peaks[2]


def test_blocks_of_other_gpus_are_left_out() -> None:
    other = {"device": 0, "address": 1, "total_size": 2 * MIB, "segment_type": "small", "blocks": "not read"}
    snapshot = synthetic_snapshot()
    snapshot["segments"].insert(0, other)
    assert allocator.read_trace(snapshot, 1, SYNTHETIC_BASE, SYNTHETIC_STATS).contradiction == ""


def test_a_history_that_contradicts_itself_has_no_curves() -> None:
    snapshot = synthetic_snapshot()
    snapshot["segments"].clear()
    log = allocator.read_trace(snapshot, 1, SYNTHETIC_BASE, SYNTHETIC_STATS)
    assert log.allocated is log.reserved is None and log.n_bytes.tolist() == [900, -900, -600, 10]
    assert "no curve: Events and segments of device 1 contradict" in doubts(log, 1900)[0]


@pytest.mark.parametrize("n_lost", [1, 2, 4, 5, 6, 7])
def test_a_full_history_is_noticed_and_still_right_for_what_it_holds(n_lost: int) -> None:
    """The ring keeps the newest entries: levels are hung up at the end, where the counters stand."""
    whole = allocator.read_trace(synthetic_snapshot(), 1, SYNTHETIC_BASE, SYNTHETIC_STATS)
    log = allocator.read_trace(synthetic_snapshot(n_lost), 1, SYNTHETIC_BASE, SYNTHETIC_STATS)
    n_events = len(log.n_bytes)
    assert log.base_bytes == whole.base_bytes + whole.n_bytes[: len(whole.n_bytes) - n_events].sum()
    for ours, theirs in ((log.allocated, whole.allocated), (log.reserved, whole.reserved)):
        assert ours[1:].tolist() == theirs[len(theirs) - n_events :].tolist()
    if log.base_bytes != whole.base_bytes:
        assert not log.is_complete
        assert "history was full" in doubts(log, 410)[0] and "1,900 bytes" in doubts(log, 410)[0]


def test_a_ring_that_is_just_full_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("explorer.engine.device.allocator.MAX_ENTRIES", len(SYNTHETIC_TRACE))
    assert not allocator.read_trace(synthetic_snapshot(), 1, SYNTHETIC_BASE, SYNTHETIC_STATS).is_complete


def test_a_drawn_peak_that_the_allocator_contradicts_is_said() -> None:
    log = allocator.read_trace(synthetic_snapshot(), 1, SYNTHETIC_BASE, SYNTHETIC_STATS)
    assert doubts(log, 1899) == ["The drawn peak is 1,899 bytes; the allocator's own requested peak is 1,900 bytes."]


def test_a_clock_that_steps_back_does_not_reorder_the_history() -> None:
    trace = synthetic_trace()
    trace[3]["time_us"] = 1
    log = allocator.read_trace({"device_traces": [trace], "segments": []}, 0, SYNTHETIC_BASE, SYNTHETIC_STATS)
    assert log.n_bytes.tolist() == [900, -900, -600, 10]
    assert log.time_ns.tolist() == [2500, 2500, 5500, 7500]


@pytest.fixture
def made_up_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """torch.cuda as its sources document it, without a GPU; the list collects how the history was switched."""
    switched: list[str | None] = []
    stats = iter([SYNTHETIC_STATS, SYNTHETIC_BASE | {"requested_bytes.all.peak": 0}, SYNTHETIC_STATS])

    def record(
        enabled: str | None = "all", context: str | None = "all", stacks: str = "all", max_entries: int = 1,
        clear_history: bool = False,
    ) -> None:  # fmt: skip
        assert enabled is None or (context is None and clear_history and max_entries > 10**6)
        switched.append(enabled)

    fakes = {
        "synchronize": lambda device: None,
        "get_allocator_backend": lambda: "native",
        "get_device_capability": lambda device: (9, 0),
        "memory_stats": lambda device: next(stats),
        "reset_peak_memory_stats": lambda device: None,
        "memory._record_memory_history": record,
        "memory._snapshot": synthetic_snapshot,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(f"torch.cuda.{name}", fake)
    return switched


def test_the_history_of_the_right_gpu_is_read_and_switched_off(made_up_cuda: list[str | None]) -> None:
    recorder = allocator.CudaRecorder(torch.device("cuda", 1))
    with pytest.raises(ValueError, match="in the step"), recorder:
        assert made_up_cuda == ["all"]
        raise ValueError("in the step")
    assert made_up_cuda == ["all", None]
    assert recorder.log.is_complete and recorder.log.n_bytes.tolist() == [900, -900, -600, 10]


def test_a_gpu_that_died_in_the_step_leaves_no_history_on(
    made_up_cuda: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dead(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    recorder = allocator.CudaRecorder(torch.device("cuda", 1))
    with pytest.raises(RuntimeError, match="device-side assert"), recorder:
        monkeypatch.setattr("torch.cuda.synchronize", dead)
    assert made_up_cuda == ["all", None]
    assert len(recorder.log.n_bytes) == 0


def test_an_allocator_without_history_is_refused_before_anything_is_switched(
    made_up_cuda: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(NotOnThisDevice, match="cudaMallocAsync"), allocator.CudaRecorder(torch.device("cuda", 1)):
        pass
    assert made_up_cuda == []
