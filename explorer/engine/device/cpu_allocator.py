"""The CPU's allocator, read through the profiler's memory events: requested bytes, scratch inside kernels included.

The profiler knows only blocks that it saw allocated: frees of older blocks come without a size or not at all.
`_read` drops such frees; the tracker, which knows the older storages, adds them. The profiler may also report a stale
size for a pointer that was handed out between two recordings; such a free follows no allocation and is dropped too.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Self

# Kineto prints "USDT: profiler_start" to stderr unless its log level is set before its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import numpy as np
import torch
from torch._C._profiler import RecordScope, _EventType

from explorer.engine.device.allocator import AllocatorLog

PROFILER: Any = torch._C._autograd
EMPTY = np.zeros(0, dtype=np.int64)
ONLY_MEMORY = {RecordScope.STATIC_RUNTIME_MODEL}
"""A scope that nothing here opens, so that the profiler leaves out every operator. The tree of operators is not needed
and costs 0.9 s a step of the sample GPT (torch 2.13). Memory events are recorded in any scope.

The scope of `record_function` is unsafe: an optimizer's step is such a range. If a recording ends inside the range
and the next begins, as between two watched steps, the profiler writes the range's end into freed memory.
"""


class CpuRecorder:
    """Records between enter and exit; see `Recorder`."""

    def __init__(self) -> None:
        self.log = AllocatorLog(time_ns=EMPTY, pointer=EMPTY, n_bytes=EMPTY)

    def __enter__(self) -> Self:
        settings: Any = torch.autograd.profiler.profile(profile_memory=True)
        config, activities = settings.config(), settings.kineto_activities
        PROFILER._prepare_profiler(config, activities)
        PROFILER._enable_profiler(config, activities, ONLY_MEMORY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.log = _read(PROFILER._disable_profiler())


def _read(recorded: Any) -> AllocatorLog:
    """Every memory event of the CPU in order of time."""
    todo: list[Any] = recorded.experimental_event_tree()
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
