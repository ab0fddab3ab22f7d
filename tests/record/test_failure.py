"""The kind of a failure depends on where it was raised, never on how far it travelled; memory is told by its words."""

from __future__ import annotations

import pytest

from explorer.errors import BadInput, Cancelled, Crashed, ModelFailed, NotOnThisDevice, OutOfMemory
from explorer.record.failure import failure_of, is_out_of_memory, refusal_behind

CPU = (
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
)


class OutOfMemoryError(RuntimeError):
    """torch's, by name: the record ring imports no torch."""


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OutOfMemory("full"), OutOfMemoryError("CUDA"), RuntimeError(CPU), RuntimeError("std::bad_alloc")],
)
def test_memory_that_ran_out_is_found_among_causes(error: Exception) -> None:
    wrapper = ValueError("the layer failed")
    wrapper.__cause__ = error
    assert refusal_behind(wrapper) is error is refusal_behind(error)
    assert {failure_of(wrapper, in_step=step).kind for step in (True, False)} == {"out of memory"}


def test_words_alone_are_not_enough_and_a_circle_ends() -> None:
    assert not is_out_of_memory(ValueError("std::bad_alloc")) and not is_out_of_memory(RuntimeError("memory"))
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one
    assert not is_out_of_memory(one)


def test_bytes_asked_are_read_from_torchs_words() -> None:
    failure = failure_of(RuntimeError(CPU), in_step=True)
    assert (failure.asked_bytes, failure.sentence) == (4096, "The run asked for 4,096 bytes and was refused.")
    own = failure_of(OutOfMemory("full", asked_bytes=7, free_bytes=3, hint="less"), in_step=False)
    assert (own.asked_bytes, own.free_bytes, own.hint) == (7, 3, "less")


@pytest.mark.parametrize(
    ("error", "in_step", "elsewhere"),
    [
        (ModelFailed("x"), "model raised", "model raised"),
        (BadInput("x"), "bad input", "bad input"),
        (NotOnThisDevice("x"), "not on this device", "not on this device"),
        (Cancelled("x"), "cancelled", "cancelled"),
        (Crashed("x"), "crash", "crash"),
        (KeyboardInterrupt(), "cancelled", "cancelled"),
        (SystemExit(3), "model raised", "model raised"),
        (GeneratorExit(), "model raised", "model raised"),
        (KeyError("x"), "model raised", "internal"),
    ],
)
def test_the_table_of_kinds(error: BaseException, in_step: str, elsewhere: str) -> None:
    assert failure_of(error, in_step=True).kind == in_step
    assert failure_of(error, in_step=False).kind == elsewhere
