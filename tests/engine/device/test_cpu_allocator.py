"""The CPU's allocator: every byte handed out is in the log, whatever happened in the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._profiler import _EventType
from torch.profiler import record_function

from explorer.engine.device import cpu_allocator
from explorer.engine.device.allocator import AllocatorLog, lifetimes
from explorer.engine.device.cpu_allocator import EMPTY, CpuRecorder


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

    monkeypatch.setattr(cpu_allocator, "_read", read)
    with CpuRecorder(), record_function("Optimizer.step"):
        torch.ones(64).exp()
    assert set(tags) == {_EventType.Allocation}
