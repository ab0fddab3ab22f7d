"""The one place where a run chooses between CPU and CUDA: two small classes behind one interface.

Nothing else in the step or the measurement asks which device it is on.
"""

from __future__ import annotations

import gc
import os
import platform
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch

from explorer.engine.device.allocator import Recorder
from explorer.engine.device.clocks import Clock, CpuClock, CudaClock
from explorer.engine.device.cpu_allocator import CpuRecorder
from explorer.engine.device.cuda_allocator import CudaRecorder
from explorer.engine.device.limits import limited_cuda, limited_process
from explorer.record.measurement import Environment


class Device(Protocol):
    """What a measurement needs from a device."""

    torch: torch.device

    def recorder(self) -> Recorder: ...

    def clock(self) -> Clock: ...

    def environment(self, n_threads: int) -> Environment: ...

    def release(self) -> None:
        """Gives back what earlier runs left in caches, so that it is not charged to the next."""
        ...

    def limited(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        """No more than `limit_bytes` may be taken inside; None: what the machine has."""
        ...


class CpuDevice:
    torch = torch.device("cpu")

    def recorder(self) -> Recorder:
        return CpuRecorder()

    def clock(self) -> Clock:
        return CpuClock()

    def environment(self, n_threads: int) -> Environment:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return _environment("cpu", _cpu_name(), n_threads, total_bytes)

    def release(self) -> None:
        gc.collect()

    def limited(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        return limited_process(limit_bytes)


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        self.torch = device

    def recorder(self) -> Recorder:
        return CudaRecorder(self.torch)

    def clock(self) -> Clock:
        return CudaClock(self.torch)

    def environment(self, n_threads: int) -> Environment:
        properties = torch.cuda.get_device_properties(self.torch)
        return _environment("cuda", properties.name, n_threads, properties.total_memory)

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def limited(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        return limited_cuda(limit_bytes, self.torch)


def device_of(device: torch.device) -> Device:
    """The edge."""
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


def _environment(device: str, name: str, n_threads: int, total_bytes: int) -> Environment:
    return Environment(
        device=device,
        device_name=name,
        torch_version=str(torch.__version__),
        python_version=platform.python_version(),
        platform=platform.platform(terse=True),
        n_threads=n_threads,
        total_memory_bytes=total_bytes,
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
