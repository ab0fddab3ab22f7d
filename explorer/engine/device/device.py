"""The choice between CPU and CUDA: two small classes behind one interface.

No other part of the step or the measurement asks for the kind of device.
"""

from __future__ import annotations

import gc
import os
import platform
import re
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch import nn

from explorer.engine.device.allocator import Recorder
from explorer.engine.device.clocks import Clock, CpuClock, CudaClock, Ticks, WallClock
from explorer.engine.device.cpu_allocator import CpuRecorder
from explorer.engine.device.cuda_allocator import CudaRecorder
from explorer.engine.device.free_memory import available_bytes
from explorer.engine.device.limits import limited_cuda, limited_process
from explorer.engine.state.global_state import tf32_kinds
from explorer.errors import BadInput
from explorer.record.measurement import Environment

DRIVER = Path("/proc/driver/nvidia/version")
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


class Device(Protocol):
    """The interface of a device to a measurement."""

    torch: torch.device

    def recorder(self) -> Recorder: ...

    def clock(self) -> Clock: ...

    def wall(self) -> Ticks:
        """The clock of a rank's actions: elapsed time, waiting included."""
        ...

    def environment(self, n_threads: int) -> Environment: ...

    def release(self) -> None:
        """Frees what earlier runs left in caches, so that the next run is not charged for it."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes that can still be allocated; None if the system does not report them."""
        ...

    def limited(self, limit_bytes: int | None, there_bytes: int = 0) -> AbstractContextManager[None]:
        """Limits memory inside to `limit_bytes`; None sets no limit. `there_bytes` of the limit are held already (a
        GPU counts them itself). Steps on a CPU take almost twice as long inside, see heap.py."""
        ...

    def limited_again(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        """As `limited`, for timed steps that have run under the limit; none on a CPU, where it disturbs the clock."""
        ...


class CpuDevice:
    torch = torch.device("cpu")

    def recorder(self) -> Recorder:
        return CpuRecorder()

    def clock(self) -> Clock:
        return CpuClock()

    def wall(self) -> Ticks:
        return WallClock()

    def environment(self, n_threads: int) -> Environment:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return _environment("cpu", _cpu_name(), n_threads, total_bytes)

    def release(self) -> None:
        gc.collect()

    def free_bytes(self) -> int | None:
        return available_bytes()

    def limited(self, limit_bytes: int | None, there_bytes: int = 0) -> AbstractContextManager[None]:
        return limited_process(limit_bytes, there_bytes)

    def limited_again(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        return nullcontext()


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        self.torch = device

    def recorder(self) -> Recorder:
        return CudaRecorder(self.torch)

    def clock(self) -> Clock:
        return CudaClock(self.torch)

    def wall(self) -> Ticks:
        return CudaClock(self.torch)

    def environment(self, n_threads: int) -> Environment:
        properties = torch.cuda.get_device_properties(self.torch)
        plain = _environment("cuda", properties.name, n_threads, properties.total_memory)
        return msgspec.structs.replace(
            plain,
            cuda_version=torch.version.cuda or "",
            cudnn_version=str(torch.backends.cudnn.version() or ""),
            driver_version=_driver_version(),
            tf32=tf32_kinds(),
            allocator_settings=_allocator_settings(),
        )

    def release(self) -> None:
        gc.collect()
        with suppress(RuntimeError):  # a GPU refuses this after a failed assertion: the next step reports the error
            torch.cuda.empty_cache()

    def free_bytes(self) -> int | None:
        try:
            free_bytes, _ = torch.cuda.mem_get_info(self.torch)
        except RuntimeError:  # a GPU does not answer after a failed assertion
            return None
        return int(free_bytes + torch.cuda.memory_reserved(self.torch) - torch.cuda.memory_allocated(self.torch))

    def limited(self, limit_bytes: int | None, there_bytes: int = 0) -> AbstractContextManager[None]:
        return limited_cuda(limit_bytes, self.torch)

    def limited_again(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        return self.limited(limit_bytes)


def device_of(device: torch.device) -> Device:
    """The interface of `device`."""
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


def _driver_version() -> str:
    """Version of the NVIDIA driver; empty if it cannot be read."""
    try:
        text = DRIVER.read_text()
    except OSError:
        return ""
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return version[0] if version else ""


def _allocator_settings() -> str:
    """Settings of the caching allocator in the environment: `PYTORCH_ALLOC_CONF=expandable_segments:True`."""
    return " ".join(f"{name}={os.environ[name]}" for name in ALLOCATOR_SETTINGS if name in os.environ)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def place_of(model: nn.Module) -> torch.device:
    """Device of a model: a GPU if any tensor of the model is there. Raises BadInput for other devices."""
    places = {tensor.device.type: tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if "cuda" in places:
        return places["cuda"]
    if set(places) <= {"cpu"}:
        return torch.device("cpu")
    raise BadInput(
        f"A step can be recorded on cpu and cuda; this model lies on {', '.join(sorted(places))}.",
        hint="Move the model to one of them.",
    )
