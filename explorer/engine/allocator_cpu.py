"""The CPU's allocator, read through the profiler's memory events: requested bytes, scratch inside kernels included.

The profiler knows only blocks it saw being born, so frees of older ones come without a size or not at all; they are
dropped here, and whoever knows the older storages adds their deaths. It may also report a stale size for a pointer
that was handed out between two recordings; such a free follows no allocation and is dropped the same way.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

# Kineto prints "USDT: profiler_start" to stderr, whatever its caller wants, unless told before its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import numpy as np
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from explorer.engine.allocator import AllocatorLog

EMPTY = np.zeros(0, dtype=np.int64)


class CpuRecorder:
    """Records between enter and exit; see `Recorder`."""

    def __init__(self) -> None:
        self.log = AllocatorLog(time_ns=EMPTY, pointer=EMPTY, n_bytes=EMPTY)
        self._profile: profile | None = None

    def __enter__(self) -> Self:
        # acc_events changes nothing for one cycle; without it torch 2.11 warns on every use.
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._profile is not None
        recorded, self._profile = self._profile, None
        recorded.__exit__(None, None, None)
        self.log = _read(recorded)


def _read(recorded: profile) -> AllocatorLog:
    """Every memory event of the CPU in order of time."""
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    todo: list[Any] = recorded.profiler.kineto_results.experimental_event_tree()
    todo.reverse()
    events: list[tuple[int, int, int]] = []
    while todo:
        event = todo.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu" and fields.alloc_size:
                events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        else:
            todo.extend(reversed(event.children))
    columns = np.array(events, dtype=np.int64).reshape(-1, 3)
    columns = columns[np.argsort(columns[:, 0], kind="stable")]
    return AllocatorLog(time_ns=columns[:, 0], pointer=columns[:, 1], n_bytes=columns[:, 2])
