"""What libraries map for themselves in the first step of a shape is no part of what a limit is for."""

from __future__ import annotations

import mmap
import platform

import pytest

from explorer.engine.bench.measure import measure
from explorer.engine.device.device import CpuDevice
from explorer.engine.device.first_step import MOST_TRIES, first_step
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.engine.model.describe import describe
from explorer.errors import OutOfMemory
from explorer.plan.policy.presets import preset
from explorer.record import ModelRef, RunSpec
from explorer.record.plan import Report, silent

MIB = 2**20


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


def test_it_is_tried_again_from_scratch_while_a_try_leaves_more_behind() -> None:
    library = Library()
    assert first_step(CPU, library.make, library.step) == (4, "step of 4")


def test_a_step_that_leaves_nothing_behind_is_refused_at_once() -> None:
    n_tries = 0

    def step(made: None) -> None:
        nonlocal n_tries
        n_tries += 1
        held = mmap.mmap(-1, 8 * MIB)  # its own memory, which goes with it
        raise OutOfMemory(f"{len(held)} are too many")

    with pytest.raises(OutOfMemory, match="too many"):
        first_step(CPU, lambda: None, step)
    assert n_tries == 1


def test_a_model_that_keeps_something_of_every_step_is_refused_in_the_end() -> None:
    kept: list[mmap.mmap] = []

    def leaks(made: None) -> None:
        assert len(kept) < 2 * MOST_TRIES, "it would go on until the machine has nothing left"
        kept.append(mmap.mmap(-1, 2 * MIB))
        raise OutOfMemory("no room")

    with pytest.raises(OutOfMemory, match="no room"):
        first_step(CPU, lambda: None, leaks)
    assert len(kept) == MOST_TRIES


def test_what_fails_for_another_reason_is_not_tried_twice() -> None:
    library = Library()

    def fails(made: int) -> None:
        library.kernels.append(mmap.mmap(-1, 8 * MIB))
        raise ValueError("not memory")

    with pytest.raises(ValueError, match="not memory"):
        first_step(CPU, library.make, fails)
    assert library.made == 1


def ran(spec: RunSpec, _: Report) -> bool:
    return measure(spec).failure is None


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc lets holes be left out")
@pytest.mark.parametrize(("limit_mib", "fits"), [(29, False), (36, True)])
def test_a_net_of_convolutions_fits_into_what_it_holds(limit_mib: int, fits: bool) -> None:
    """The sample U-Net, recomputed, holds 31 MiB. In a process whose library has written no kernel yet."""
    model = ModelRef(target="sample_models/unet.py", size="small")
    policy = preset("all", describe(model))
    spec = RunSpec(model=model, n_repeats=0, policy=policy, memory_limit_bytes=limit_mib * MIB)
    assert call_in_subprocess(ran, spec, report=silent, what="ran convolutions") == fits
