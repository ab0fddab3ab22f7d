"""Settings of glibc's malloc for tensors on the CPU: memory limits and clocks need different settings.

A large tensor is a separate mapping or a piece of the heap. A mapping is returned to the system at once, and a new
one faults in every page: 0.56 ms a MiB (2.2 us a page of 4 KiB, kernel 6, an AMD EPYC). The heap keeps freed memory
as holes, which count as taken although no tensor uses them. The heap returns only the free memory at its end.

The settings work on Linux with glibc and have no effect elsewhere. All threads share the settings: use one at a time.
Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt: free bytes allowed at the heap's end; size from which on a tensor is a separate mapping."""
_COMES_TO = {_TRIM_THRESHOLD: 2**26, _MMAP_THRESHOLD: 2**25}
"""Largest values (64 bit), to which glibc moves both parameters as soon as a tensor of 32 MiB is freed."""
_SMALL_BYTES = 2**16


@contextmanager
def without_holes() -> Iterator[None]:
    """Maps tensors of 64 KiB and more separately: address space is what the step holds, and little more.

    Steps take almost twice as long inside, so timed steps run outside.
    """
    with _set({_MMAP_THRESHOLD: _SMALL_BYTES}):
        yield


@contextmanager
def without_page_faults() -> Iterator[None]:
    """Lets the heap keep freed memory: timed steps find the same memory each time, as with a caching allocator.

    With glibc's defaults the time of one step varied by up to a fifth. With everything kept, 30 to 50 MiB were
    returned and faulted in again each step; with everything recomputed, none.
    """
    with _set({_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: _COMES_TO[_MMAP_THRESHOLD]}):
        yield


@contextmanager
def _set(settings: dict[int, int]) -> Iterator[None]:
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    for setting, value in settings.items():
        libc.mallopt(setting, value)
    try:
        yield
    finally:
        for setting, value in _COMES_TO.items():
            libc.mallopt(setting, value)
        libc.malloc_trim(0)
