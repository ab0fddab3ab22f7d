"""The choice between CPU and CUDA: two small classes behind one interface, and the clocks of both.

No other part of the step or the measurement asks for the kind of device.
"""

from __future__ import annotations

import gc
import os
import platform
import re
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from explorer.engine.device.allocator import CpuRecorder, CudaRecorder
from explorer.engine.device.memory_limit import available_bytes, cuda_memory_limit, process_memory_limit
from explorer.engine.state.global_state import tf32_kinds
from explorer.errors import BadInput
from explorer.record.measurement import Environment

ClockName = Literal["process CPU time", "CUDA events"]
Mark = Any
"""A moment on a clock: nanoseconds, or an event of CUDA."""
DRIVER = Path("/proc/driver/nvidia/version")
ALLOCATOR_SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "CUBLAS_WORKSPACE_CONFIG",
)
"""Environment variables of the caching allocator: `PYTORCH_ALLOC_CONF=expandable_segments:True`."""


class WallClock:
    """Time of day: the only clock that several processes share.

    Marks are cheap; `settle` waits for the device, after which marks can be compared.
    """

    def mark(self) -> Mark:
        return time.time_ns()

    def settle(self) -> None:
        """A CPU has finished all work when Python continues."""

    def between_ms(self, first: Mark, last: Mark) -> float:
        return (last - first) / 1e6


class CpuClock(WallClock):
    """CPU time of all threads of this process: the step alone is charged.

    Wall time on a shared machine varies tenfold between equal steps; CPU time with one thread does not
    (0.28 to 0.32 s against 0.76 to 12.6 s on two loaded cores, torch 2.13).
    """

    name: ClockName = "process CPU time"

    def mark(self) -> Mark:
        return time.process_time_ns()


class CudaClock:
    """Events in the current stream: the time between two events on the GPU.

    A GPU that finishes before Python launches the next kernel waits, and the wait counts. Times of small models are
    therefore times of Python, and so are the hooks of a block.
    """

    name: ClockName = "CUDA events"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def between_ms(self, first: Mark, last: Mark) -> float:
        return float(first.elapsed_time(last))


Clock = CpuClock | CudaClock
Ticks = WallClock | CudaClock


class CpuDevice:
    """What a measurement asks of a device, answered by a CPU; `CudaDevice` answers the same."""

    torch = torch.device("cpu")

    def recorder(self) -> CpuRecorder:
        return CpuRecorder()

    def clock(self) -> Clock:
        return CpuClock()

    def wall(self) -> Ticks:
        """The clock of a rank's actions: elapsed time, waiting included."""
        return WallClock()

    def environment(self, n_threads: int) -> Environment:
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return _environment("cpu", _cpu_name(), n_threads, total_bytes)

    def release(self) -> None:
        """Frees what earlier runs left in caches, so that the next run is not charged for it."""
        gc.collect()

    def free_bytes(self) -> int | None:
        """Bytes that can still be allocated; None if the system does not report them."""
        return available_bytes()

    def memory_limit(self, limit_bytes: int | None, resident_bytes: int = 0) -> AbstractContextManager[None]:
        """Limits memory inside to `limit_bytes`; None sets no limit. `resident_bytes` of the limit are held already (a
        GPU counts them itself). Steps on a CPU take almost twice as long inside, see memory_limit.py."""
        return process_memory_limit(limit_bytes, resident_bytes)

    def timed_memory_limit(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        """As `memory_limit`, for timed steps that have run under the limit; no limit on a CPU, where it disturbs the
        clock."""
        return nullcontext()


class CudaDevice:
    def __init__(self, device: torch.device) -> None:
        self.torch = device

    def recorder(self) -> CudaRecorder:
        return CudaRecorder(self.torch)

    def clock(self) -> Clock:
        return CudaClock(self.torch)

    def wall(self) -> Ticks:
        return CudaClock(self.torch)

    def environment(self, n_threads: int) -> Environment:
        properties = torch.cuda.get_device_properties(self.torch)
        plain = _environment("cuda", properties.name, n_threads, properties.total_memory)
        return replace(
            plain,
            cuda_version=torch.version.cuda or "",
            cudnn_version=str(torch.backends.cudnn.version() or ""),
            driver_version=_driver_version(),
            tf32=tf32_kinds(),
            allocator_settings=" ".join(
                f"{name}={os.environ[name]}" for name in ALLOCATOR_SETTINGS if name in os.environ
            ),
            capability=f"{properties.major}.{properties.minor}",
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

    def memory_limit(self, limit_bytes: int | None, resident_bytes: int = 0) -> AbstractContextManager[None]:
        return cuda_memory_limit(limit_bytes, self.torch)

    def timed_memory_limit(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        return self.memory_limit(limit_bytes)


Device = CpuDevice | CudaDevice


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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_of_model(model: nn.Module) -> torch.device:
    """Device of a model: its last GPU if any tensor of the model is on one. Raises BadInput for other devices."""
    devices = {tensor.device.type: tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    if "cuda" in devices:
        return devices["cuda"]
    if set(devices) <= {"cpu"}:
        return torch.device("cpu")
    raise BadInput(
        f"A step can be recorded on cpu and cuda; this model lies on {', '.join(sorted(devices))}.",
        hint="Move the model to one of them.",
    )


def current_rank() -> tuple[int, int] | None:
    """Rank of this process and the number of ranks; None for a process that runs alone.

    torchrun names both to a process. Workers of torch.multiprocessing know them from their process group.
    """
    n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if n_ranks > 1:
        return int(os.environ.get("RANK", "0")), n_ranks
    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    return (dist.get_rank(), dist.get_world_size()) if dist.get_world_size() > 1 else None


def path_of_rank(path: Path) -> Path:
    """The path with the rank, unless it has it: `oom.explorer` becomes `oom.rank3.explorer` under torchrun."""
    rank = current_rank()
    if rank is None or path.stem.endswith(f".rank{rank[0]}"):
        return path
    return path.with_name(f"{path.stem}.rank{rank[0]}{path.suffix}")


def rank_text() -> str:
    """The rank as text: `, rank 3`; empty for a process that runs alone."""
    rank = current_rank()
    return "" if rank is None else f", rank {rank[0]}"
