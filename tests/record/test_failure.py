"""The kind of a failure depends on where it was raised, never on how far it travelled; memory is told by its words."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import BadInput, Cancelled, Crashed, ModelFailed, NotOnThisDevice, OutOfMemory
from explorer.record.base import column, from_msgpack, to_msgpack
from explorer.record.failure import Failure, failure_of, is_out_of_memory, refusal_behind

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


def test_what_the_models_own_code_raises_is_told_by_its_place() -> None:
    """This file stands for the model's."""
    kinds = []
    for call in (lambda: {}["x"], lambda: json.loads("{"), lambda: column("x"), lambda: np.empty(-1)):
        try:
            call()
        except Exception as error:
            kinds.append(failure_of(error, in_step=False).kind)
    assert kinds == ["model raised", "model raised", "internal", "model raised"]


@given(st.text(), st.text(alphabet="\x1b\udcffab é\n", max_size=30), st.integers(1, 3000))
def test_any_failure_can_be_written_and_shown(text: str, part: str, times: int) -> None:
    failure = Failure(kind="crash", sentence=text + part * times, hint=part * times, traceback=part * times)
    assert from_msgpack(to_msgpack(failure), Failure) == failure
    assert failure.sentence.isprintable() and len(failure.sentence) < 20_000
    assert all(len(word) <= 240 for word in failure.hint.split())


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
