"""Memory limits of a process or a GPU, the memory that is free, and a refusal as a result with its text and bytes.

A limit bounds a process's address space (CPU) or torch's share of a GPU; the old limit returns afterwards. Under a
limit that the user set, tensors are mapped one by one, so that holes of the heap do not count. Under the limit of the
machine, where steps are timed, the heap keeps its settings.

On Linux with glibc a large tensor is a separate mapping or a piece of the heap. A mapping is returned to the system at
once, and a new one faults in every page: 0.56 ms a MiB (2.2 us a page of 4 KiB, kernel 6, an AMD EPYC). The heap keeps
freed memory as holes, which count as taken although no tensor uses them, and returns only the free memory at its end.
All threads share the settings of malloc: use one at a time.
Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

from __future__ import annotations

import ctypes
import platform
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from explorer.engine.device.allocator import Refusal
from explorer.errors import NotOnThisDevice, OutOfMemory, message_of
from explorer.plan.sizes import mib
from explorer.record.failure import CPU_REFUSAL, Failure, failure_of, is_out_of_memory, refusal_behind

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]

_CUDA_REFUSAL = re.compile(
    r"Tried to allocate ([\d.]+) (bytes|[KMGT]iB).*? of which ([\d.]+) (bytes|[KMGT]iB) is free", re.S
)
_NO_ROOM = re.compile(r"could not (create|execute) a |can't start new thread")
"""Messages of oneDNN and Python when no address space is left; without a limit the messages have other causes."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt: free bytes allowed at the heap's end; size from which on a tensor is a separate mapping."""
_DEFAULTS = {_TRIM_THRESHOLD: 2**26, _MMAP_THRESHOLD: 2**25}
"""Largest values (64 bit), to which glibc moves both parameters as soon as a tensor of 32 MiB is freed."""
_settings = dict(_DEFAULTS)
"""The values now. malloc does not tell them."""
_SMALL_BYTES = 2**16
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat"),  # version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),  # version 1
)
LEFT_BYTES = 2**20
"""Growth of the address space from which on a refused step is repeated."""
MOST_TRIES = 20
_HEADROOM_BYTES = 2**20
"""Free memory of the heap when a limit begins, for what libraries take beside tensors."""

Made = TypeVar("Made")
Result = TypeVar("Result")


@contextmanager
def process_memory_limit(limit_bytes: int | None, resident_bytes: int = 0) -> Iterator[None]:
    """Limits this process to `limit_bytes` of address space, of which it holds `resident_bytes` already.

    Raises OutOfMemory if `resident_bytes` exceed the limit, and NotOnThisDevice off Linux. Under glibc the limit bounds
    the bytes that tensors hold at once, within a MiB or two. A tensor that fits into an old hole of the heap is not
    counted: after other steps, a process may exceed the limit by its holes.
    """
    if limit_bytes is None:
        yield
        return
    if resident_bytes > limit_bytes:
        raise OutOfMemory(
            f"Parameters, optimizer state and batch hold {resident_bytes:,} bytes; the limit is {limit_bytes:,}.",
            hint="Raise the memory limit, or take a smaller size: recomputing activations cannot help.",
            free_bytes=0,
        )
    with without_heap_holes():
        _grow_heap()
        with _limited_address_space(limit_bytes - resident_bytes):
            yield


def _grow_heap() -> None:
    """Gives the heap a free MiB: a library that asks for a few bytes and gets none ends the process by SIGSEGV."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    for piece in [libc.malloc(_SMALL_BYTES // 2) for _ in range(2 * _HEADROOM_BYTES // _SMALL_BYTES)]:
        libc.free(piece)


@contextmanager
def _limited_address_space(limit_bytes: int) -> Iterator[None]:
    size_bytes = address_space_bytes()
    if resource is None or size_bytes is None:
        raise NotOnThisDevice(
            "The run asks for a memory limit; this operating system cannot limit a process.",
            hint="Leave the limit out, or run on Linux.",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_lowest(size_bytes + limit_bytes, soft, hard), hard))
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) and not _NO_ROOM.match(message_of(error)):
            raise
        refusal = refusal_of(error)  # while the limit is in force: the free bytes can be read only now
        raise OutOfMemory(
            _sentence(refusal, "run"),
            hint="Take a smaller size or batch, or raise the memory limit where one was set.",
            asked_bytes=refusal.asked_bytes,
            free_bytes=refusal.free_bytes,
        ) from error
    finally:
        hard = _lowest(hard, resource.getrlimit(resource.RLIMIT_AS)[1])  # a model may have lowered it, for good
        resource.setrlimit(resource.RLIMIT_AS, (_lowest(soft, hard), hard))


def _lowest(*limits: int) -> int:
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=resource.RLIM_INFINITY)


@contextmanager
def machine_memory_limit() -> Iterator[None]:
    """Limits this process to the memory available now, less a sixteenth: a run that asks for more fails alone.

    No limit is set on a machine with a GPU, where CUDA maps far more address space than it uses.
    """
    free_bytes = available_bytes()
    if resource is None or free_bytes is None or torch.cuda.is_available():
        yield
        return
    with _limited_address_space(free_bytes - free_bytes // 16):
        yield


@contextmanager
def cuda_memory_limit(limit_bytes: int | None, device: torch.device) -> Iterator[None]:
    """Limits torch to `limit_bytes` of reserved GPU memory; the former share returns afterwards."""
    if limit_bytes is None:
        yield
        return
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    if torch.cuda.memory_reserved(device) > limit_bytes:  # else the cache stays: a step that is timed takes from it
        torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        # torch names the free bytes of the whole GPU; the limit caused the refusal, and torch has emptied its cache.
        free_bytes = max(0, limit_bytes - torch.cuda.memory_reserved(device))
        asked_bytes = refusal_of(error).asked_bytes
        raise OutOfMemory(f"{message_of(error)}.", asked_bytes=asked_bytes, free_bytes=free_bytes) from error
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def address_space_bytes() -> int | None:
    """Size of this process's address space now; None if the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return None
    return pages * resource.getpagesize()


def available_bytes() -> int | None:
    """Memory available without swapping: the lower of the machine's and the container's; None if neither is known."""
    limits = [kilobytes * 1024 for name, kilobytes in _table(_MEMINFO).items() if name == "MemAvailable:"]
    if (n_bytes := _of_container()) is not None:
        limits.append(n_bytes)
    return min(limits, default=None)


def _of_container() -> int | None:
    """Free bytes under the container's limit. File caches that the kernel may drop count as free."""
    for limit_name, used_name, table_name in _CGROUP_FILES:
        limit, used = _number(_CGROUP / limit_name), _number(_CGROUP / used_name)
        if limit is not None and used is not None:
            return max(0, limit - used + _table(_CGROUP / table_name).get("inactive_file", 0))
    return None


def _number(path: Path) -> int | None:
    """The number in a file; None if the file is missing or holds a word such as `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _table(path: Path) -> dict[str, int]:
    """The first number of every line by the line's first word."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def refusal_of(error: BaseException) -> Refusal:
    """Bytes asked and free, as far as the error or its cause states them."""
    refusal = refusal_behind(error) or error
    if isinstance(refusal, OutOfMemory):
        is_rounded = bool(_CUDA_REFUSAL.search(str(refusal.__cause__)))
        return Refusal(refusal.asked_bytes, refusal.free_bytes, is_rounded)
    if words := CPU_REFUSAL.search(str(refusal)):
        return Refusal(int(words[1]), _free_here())
    if words := _CUDA_REFUSAL.search(str(refusal)):
        asked, free = (int(float(words[i]) * _UNITS[words[i + 1]]) for i in (1, 3))
        return Refusal(asked, free, is_rounded=True)
    return Refusal(None, None)


def failure_in_step(error: BaseException) -> Failure:
    """The error of a step as a result; an out-of-memory result has the bytes asked and free."""
    if is_out_of_memory(error):
        return out_of_memory(refusal_of(error), "".join(traceback.format_exception(error)))
    return failure_of(error, in_step=True)


def out_of_memory(refusal: Refusal, text: str) -> Failure:
    """The failure of a step that ran out of memory; `text` is the traceback."""
    return Failure(
        kind="out of memory",
        sentence=_sentence(refusal, "step"),
        hint="Recompute more blocks, take a smaller batch, or split the batch into microbatches.",
        traceback=text,
        asked_bytes=refusal.asked_bytes,
        free_bytes=refusal.free_bytes,
    )


def _sentence(refusal: Refusal, who: str) -> str:
    def size(n_bytes: int) -> str:
        return f"about {mib(n_bytes)}" if refusal.is_rounded else f"{n_bytes:,} bytes"

    request = "more memory" if refusal.asked_bytes is None else size(refusal.asked_bytes)
    free = "" if refusal.free_bytes is None else f"; {size(refusal.free_bytes)} were free"
    return f"The {who} asked for {request} and was refused{free}."


def _free_here() -> int | None:
    """Bytes that the process can still take: under its limit if there is a limit, else of the machine."""
    size_bytes = address_space_bytes()
    if resource is not None and size_bytes is not None:
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            return max(0, soft - size_bytes)
    return available_bytes()


def first_step(
    release: Callable[[], None], make: Callable[[], Made], step: Callable[[Made], Result]
) -> tuple[Made, Result]:
    """The results of `make()` and `step(made)`; `step` sets the limit. Raises the error of the last try.

    A step is repeated while libraries map memory for themselves. oneDNN generates the code of a kernel at the first use
    of a shape: 34 MiB in the first step of the sample U-Net, none in the second. A limit on a CPU limits address space,
    so the code counts although the step does not hold it. A refused step is repeated as long as the last try enlarged
    the address space: the next try finds the code mapped. `release` frees what a try has left in caches. A model that
    keeps something of every step grows at each try, so MOST_TRIES bounds the tries.
    """
    n_tries = 0
    while True:
        n_tries += 1
        made, before_bytes = make(), address_space_bytes()
        try:
            return made, step(made)
        except Exception as error:
            if before_bytes is None or not is_out_of_memory(error):
                raise
            refused = error
        clear_frames(refused)
        del made
        release()
        if n_tries == MOST_TRIES or (address_space_bytes() or 0) - before_bytes < LEFT_BYTES:
            raise refused


def clear_frames(error: BaseException | None) -> None:
    """Clears the frames of `error` and its causes: tensors held there would count as growth."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextmanager
def without_heap_holes() -> Iterator[None]:
    """Maps tensors of 64 KiB and more separately: address space is what the step holds, and little more.

    Steps take almost twice as long inside, so timed steps run outside.
    """
    with _set({_TRIM_THRESHOLD: 2 * _HEADROOM_BYTES, _MMAP_THRESHOLD: _SMALL_BYTES}):
        yield


@contextmanager
def without_page_faults() -> Iterator[None]:
    """Lets the heap keep freed memory: timed steps find the same memory each time, as with a caching allocator.

    With glibc's defaults the time of one step varied by up to a fifth. With everything kept, 30 to 50 MiB were
    returned and faulted in again each step; with everything recomputed, none.
    """
    with _set({_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: _DEFAULTS[_MMAP_THRESHOLD]}):
        yield


@contextmanager
def _set(settings: dict[int, int]) -> Iterator[None]:
    """The context in which malloc has `settings`; contexts may be nested."""
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    before = dict(_settings)
    _apply(settings)
    try:
        yield
    finally:
        _apply(before)


def _apply(settings: dict[int, int]) -> None:
    libc = ctypes.CDLL(None)
    for setting, value in settings.items():
        libc.mallopt(setting, value)
    _settings.update(settings)
    libc.malloc_trim(0)
