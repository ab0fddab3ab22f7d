"""A limit is met when a step holds so much: not before, whatever was freed meanwhile, and not after."""

from __future__ import annotations

import ctypes
import gc
import mmap
import platform
import re
import resource
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
import torch

from explorer.engine.bench.measure import measure
from explorer.engine.bench.step import prepare, run_step
from explorer.engine.device import memory_limit
from explorer.engine.device.device import CpuDevice
from explorer.engine.device.memory_limit import (
    MOST_TRIES,
    available_bytes,
    first_step,
    machine_memory_limit,
    process_memory_limit,
    without_heap_holes,
    without_page_faults,
)
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.engine.model.describe import describe
from explorer.errors import OutOfMemory
from explorer.plan.policy.presets import preset
from explorer.record import ModelRef, RunSpec
from explorer.record.plan import Report, silent
from explorer.view.text.runs import peak_and_end
from tests.engine.tiny_nets import ref

MIB = 2**20
PEAK_MIB = 46
ON_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
BELOW, ABOVE = PEAK_MIB - 2, PEAK_MIB + 2


def ran(_: Report) -> tuple[int | None, str, list[tuple[int, bool]]]:
    """The measured peak; what a person reads of the step below it; then by limit, in turn, whether it ran."""
    spec = RunSpec(model=ref("wide", mib=1, depth=4), n_repeats=0)
    words = peak_and_end(measure(msgspec.structs.replace(spec, memory_limit_bytes=BELOW * MIB)))
    trainee, outcomes = prepare(spec), []
    for limit_mib in (BELOW, ABOVE) * 4:
        try:
            with process_memory_limit(limit_mib * MIB):
                run_step(trainee)
        except OutOfMemory:
            outcomes.append((limit_mib, False))
        else:
            outcomes.append((limit_mib, True))
    return measure(spec).step_peak_bytes, words, outcomes


@ON_GLIBC
@pytest.mark.parametrize(("resident_bytes", "is_refused"), [(MIB, False), (MIB + 1, True)])
def test_what_is_there_before_the_step_may_fill_the_limit(resident_bytes: int, *, is_refused: bool) -> None:
    refused = (
        pytest.raises(OutOfMemory, match="hold 1,048,577 bytes; the limit is 1,048,576")
        if is_refused
        else nullcontext()
    )
    with refused, process_memory_limit(MIB, resident_bytes):
        pass


@ON_GLIBC
def test_a_step_fits_just_above_what_it_holds_and_is_refused_just_below() -> None:
    """In a process of its own: a hole that steps without a limit have left may be filled."""
    answer = call_in_subprocess(ran, report=silent, what="took steps under a limit")
    peak_bytes, words, outcomes = answer
    assert peak_bytes is not None and BELOW * MIB < peak_bytes < ABOVE * MIB, "the limit is another instrument"
    assert re.fullmatch(r"at least \d+\.\d MiB, then refused", words)
    assert outcomes == [(BELOW, False), (ABOVE, True)] * 4


class Library:
    """Maps 8 MiB of its own for each of three kernels, and is refused in the middle of the second for want of room."""

    def __init__(self) -> None:
        self.kernels: list[mmap.mmap] = []
        self.made = 0

    def make(self) -> int:
        self.made += 1
        return self.made

    def step(self, made: int) -> str:
        for _ in range(3 - len(self.kernels)):
            self.kernels.append(mmap.mmap(-1, 8 * MIB))
            raise OutOfMemory("no room")
        return f"step of {made}"


CPU = CpuDevice()


@pytest.fixture
def nothing_to_release() -> None:
    """What earlier tests left would shrink the address space when a try releases it, and hide the growth."""
    gc.collect()
    CPU.release()


@pytest.mark.usefixtures("nothing_to_release")
def test_it_is_tried_again_from_scratch_while_a_try_leaves_more_behind() -> None:
    library = Library()
    assert first_step(CPU.release, library.make, library.step) == (4, "step of 4")


def test_a_step_that_leaves_nothing_behind_is_refused_at_once() -> None:
    n_tries = 0

    def step(made: None) -> None:
        nonlocal n_tries
        n_tries += 1
        held = mmap.mmap(-1, 8 * MIB)  # its own memory, which goes with it
        raise OutOfMemory(f"{len(held)} are too many")

    with pytest.raises(OutOfMemory, match="too many"):
        first_step(CPU.release, lambda: None, step)
    assert n_tries == 1


@pytest.mark.usefixtures("nothing_to_release")
def test_a_model_that_keeps_something_of_every_step_is_refused_in_the_end() -> None:
    kept: list[mmap.mmap] = []

    def leaks(made: None) -> None:
        assert len(kept) < 2 * MOST_TRIES, "it would go on until the machine has nothing left"
        kept.append(mmap.mmap(-1, 2 * MIB))
        raise OutOfMemory("no room")

    with pytest.raises(OutOfMemory, match="no room"):
        first_step(CPU.release, lambda: None, leaks)
    assert len(kept) == MOST_TRIES


def test_what_fails_for_another_reason_is_not_tried_twice() -> None:
    library = Library()

    def fails(made: int) -> None:
        library.kernels.append(mmap.mmap(-1, 8 * MIB))
        raise ValueError("not memory")

    with pytest.raises(ValueError, match="not memory"):
        first_step(CPU.release, library.make, fails)
    assert library.made == 1


def fits_within(spec: RunSpec, _: Report) -> bool:
    return measure(spec).failure is None


@pytest.mark.slow
@ON_GLIBC
@pytest.mark.parametrize(("limit_mib", "fits"), [(26, False), (36, True)])
def test_a_net_of_convolutions_fits_into_what_it_holds(limit_mib: int, fits: bool) -> None:
    """The sample U-Net, recomputed, holds 31 MiB. In a process whose library has written no kernel yet."""
    model = ModelRef(target="sample_models/unet.py", size="small")
    policy = preset("all", describe(model))
    spec = RunSpec(model=model, n_repeats=0, policy=policy, memory_limit_bytes=limit_mib * MIB)
    assert call_in_subprocess(fits_within, spec, report=silent, what="ran convolutions") == fits


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal:  4096 kB\nMemAvailable:  2048 kB\n")
    monkeypatch.setattr(memory_limit, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_limit, "_CGROUP", tmp_path)
    return tmp_path


def test_free_memory_is_the_lower_of_machine_and_container(machine: Path) -> None:
    assert available_bytes() == 2 * MIB
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("1000\n")
    assert available_bytes() == 2 * MIB
    (machine / "memory.max").write_text(f"{MIB}\n")
    (machine / "memory.current").write_text(f"{MIB}\n")
    (machine / "memory.stat").write_text("anon 5\ninactive_file 4096\n")
    assert available_bytes() == 4096, "its file cache counts as free"
    for name in ("meminfo", "memory.max"):
        (machine / name).unlink()
    assert available_bytes() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="no limit on a machine with a GPU: CUDA maps address space")
def test_a_run_that_wants_more_than_the_machine_has_fails_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: 256 * MIB)
    with pytest.raises(OutOfMemory, match="asked for 1,073,741,824 bytes and was") as caught, machine_memory_limit():
        torch.empty(1024 * MIB, dtype=torch.uint8)
    assert caught.value.asked_bytes == 1024 * MIB
    assert caught.value.free_bytes is not None and 0 < caught.value.free_bytes <= 256 * MIB
    torch.empty(1024 * MIB, dtype=torch.uint8)  # the limit is gone with the run


def test_a_machine_that_says_nothing_sets_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: None)
    with machine_memory_limit():
        assert torch.empty(256 * MIB, dtype=torch.uint8).numel() == 256 * MIB


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
    with without_heap_holes():
        with without_page_faults():
            pass
        before = mapped_bytes()
        tensor = torch.empty(MIB, dtype=torch.uint8)
        there = mapped_bytes() - before
        del tensor
        gone = mapped_bytes() - before
    again = torch.empty(MIB, dtype=torch.uint8)
    afterwards = mapped_bytes() - before
    del again
    return there, gone, afterwards


@ON_GLIBC
def test_a_tensor_is_a_mapping_of_its_own_and_goes_with_its_last_reference() -> None:
    """In a process of its own: where other tests have left a hole, a tensor may fill it."""
    answer = call_in_subprocess(mapped_and_gone, report=silent, what="mapped a tensor")
    there, gone, afterwards = answer
    assert MIB <= there < 2 * MIB and gone == 0
    assert afterwards == 0, "as it was: tensors below 32 MiB lie in the heap"


def taken_twice(_: Report) -> tuple[int, int]:
    """Pages made anew where memory has just been given back, and where that is over."""
    with without_page_faults():
        pages_made_anew()
        again = pages_made_anew()
    return again, pages_made_anew()


@ON_GLIBC
def test_memory_that_was_given_back_is_there_again() -> None:
    """In a process of its own: where other tests have left holes, other memory is taken each time."""
    answer = call_in_subprocess(taken_twice, report=silent, what="took memory twice")
    again, afterwards = answer
    assert again < PAGES / 10
    assert afterwards > PAGES / 2, "what was kept has been given back"
