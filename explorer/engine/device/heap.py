"""How glibc gives memory to tensors on the CPU: a limit and a clock each need it another way.

A large tensor is a mapping of its own or a piece of the heap. Mappings go back at once and a page of new ones has to
be made anew, which takes 0.56 ms a MiB (2.2 us a page of 4 KiB, kernel 6, an AMD EPYC). The heap keeps what was freed,
with holes between what was not: they count as taken though nobody holds them. It gives back what lies free at its end,
by chance of what lies there.

Linux with glibc alone; elsewhere nothing here has an effect. Threads share it: not for two at once.
Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of mallopt: how much may lie free at the heap's end; from what size on a tensor is a mapping of its own."""
_COMES_TO = {_TRIM_THRESHOLD: 2**26, _MMAP_THRESHOLD: 2**25}
"""Where glibc moves both by itself as soon as a tensor of 32 MiB has been freed, its largest values (64 bit)."""
_SMALL_BYTES = 2**16


@contextmanager
def without_holes() -> Iterator[None]:
    """Tensors of 64 KiB and more are mappings of their own: address space is what the step holds, and little more.

    The same steps take almost twice as long: what is timed is timed outside.
    """
    with _set({_MMAP_THRESHOLD: _SMALL_BYTES}):
        yield


@contextmanager
def without_page_faults() -> Iterator[None]:
    """The heap keeps what it has: steps that are timed find the same memory each time, as with a caching allocator.

    With what glibc does by itself the same step took up to a fifth longer or shorter, by chance: everything kept, 30
    to 50 MiB were given back and made anew each step; everything recomputed, none.
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
