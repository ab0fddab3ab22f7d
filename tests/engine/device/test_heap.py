"""What glibc is told: under a limit each large tensor is a mapping of its own, under a clock memory stays."""

from __future__ import annotations

import ctypes
import platform
import resource

import pytest
import torch

from explorer.engine.device.heap import without_holes, without_page_faults
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.record.plan import Report, silent

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone is told anything")

MIB = 2**20
PAGES = 96 * MIB // resource.getpagesize()


class Heap(ctypes.Structure):
    """mallinfo2(3)."""

    _fields_ = [
        ("heap", ctypes.c_size_t),
        ("counts", ctypes.c_size_t * 3),
        ("mapped", ctypes.c_size_t),
        ("rest", ctypes.c_size_t * 5),
    ]


def mapped_bytes() -> int:
    """In mappings of their own."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Heap
    return int(libc.mallinfo2().mapped)


def pages_made_anew() -> int:
    """While 96 MiB are taken, piece by piece, written to and given back."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pieces = [torch.ones(MIB // 4) for _ in range(96)]
    pieces.clear()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def mapped_and_gone(_: Report) -> tuple[int, int, int]:
    """Bytes that are mapped more with a tensor of a MiB, once it is gone, and with one like it afterwards."""
    with without_holes():
        before = mapped_bytes()
        tensor = torch.empty(MIB, dtype=torch.uint8)
        there = mapped_bytes() - before
        del tensor
        gone = mapped_bytes() - before
    again = torch.empty(MIB, dtype=torch.uint8)
    afterwards = mapped_bytes() - before
    del again
    return there, gone, afterwards


def test_a_tensor_is_a_mapping_of_its_own_and_goes_with_its_last_reference() -> None:
    """In a process of its own: where other tests have left a hole, a tensor may fill it."""
    answer = call_in_subprocess(mapped_and_gone, report=silent, what="mapped a tensor")
    assert answer is not None
    there, gone, afterwards = answer
    assert MIB <= there < 2 * MIB and gone == 0
    assert afterwards == 0, "as it was: tensors below 32 MiB lie in the heap"


def taken_twice(_: Report) -> tuple[int, int]:
    """Pages made anew where memory has just been given back, and where that is over."""
    with without_page_faults():
        pages_made_anew()
        again = pages_made_anew()
    return again, pages_made_anew()


def test_memory_that_was_given_back_is_there_again() -> None:
    """In a process of its own: where other tests have left holes, other memory is taken each time."""
    answer = call_in_subprocess(taken_twice, report=silent, what="took memory twice")
    assert answer is not None
    again, afterwards = answer
    assert again < PAGES / 10
    assert afterwards > PAGES / 2, "what was kept has been given back"
