"""Exceptions become failures: of which kind, in which words."""

from __future__ import annotations

import pytest

from explorer.engine.device.limits import failure_of as failure_in_step
from explorer.errors import (
    BadInput,
    Cancelled,
    Crashed,
    ExplorerError,
    InvalidPolicy,
    ModelFailed,
    ModelNotLoaded,
    NotOnThisDevice,
    NotSaved,
    OutOfMemory,
    UnreadableFile,
)
from explorer.jobs.failures import crash, failure_of


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ModelFailed("a", hint="b"), "model raised"),
        (ModelNotLoaded("a", hint="b"), "bad input"),
        (InvalidPolicy("a", hint="b"), "bad input"),
        (UnreadableFile("a", hint="b"), "bad input"),
        (NotOnThisDevice("a", hint="b"), "not on this device"),
        (Cancelled("a", hint="b"), "cancelled"),
        (Crashed("a", hint="b"), "crash"),
        (NotSaved("a", hint="b"), "internal"),
    ],
)
def test_each_error_has_its_kind(error: ExplorerError, kind: str) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.sentence, failure.hint) == (kind, "a", "b")


def test_out_of_memory_keeps_its_bytes() -> None:
    failure = failure_of(OutOfMemory("full", asked_bytes=7, free_bytes=5))
    assert failure.kind == "out of memory"
    assert (failure.asked_bytes, failure.free_bytes) == (7, 5)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


class OutOfMemoryError(RuntimeError):
    """Named as torch's, which is not imported here."""


@pytest.mark.parametrize(
    ("cause", "asked"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), 4096),
        (MemoryError(), None),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), None),
    ],
)
def test_memory_that_ran_out_is_told_through_wrappers(cause: BaseException, asked: int | None) -> None:
    for error in (raised(cause), raised(ModelFailed("forward raised"), cause)):
        failure = failure_of(error)
        assert failure.kind == "out of memory" and failure.asked_bytes == asked
        assert failure.sentence.startswith("The run asked for 4,096 bytes" if asked else "Memory ran out")


def test_a_model_that_leaves_is_told_as_such() -> None:
    failure = failure_of(raised(SystemExit(3)))
    assert (failure.kind, failure.sentence) == ("model raised", "The model called sys.exit(3).")


def test_what_nobody_foresaw_is_internal_and_shows_its_traceback() -> None:
    failure = failure_of(raised(KeyError("x")))
    assert failure.kind == "internal" and "KeyError: 'x'" in failure.sentence and "raise error" in failure.traceback


def test_a_time_out_is_told_from_a_cancel() -> None:
    assert failure_of(Cancelled("late"), timed_out=True).kind == "time-out"
    assert failure_of(BadInput("bad"), timed_out=True).kind == "bad input"
    assert failure_of(KeyboardInterrupt()).kind == "cancelled"


def test_endless_messages_are_cut() -> None:
    assert len(failure_of(ValueError("x" * 10_000)).sentence) <= 500


class Odd(BaseException):
    """What `except Exception` lets pass."""


@pytest.mark.parametrize("error", [Odd("away"), GeneratorExit("away")])
def test_what_is_no_exception_is_the_models_and_says_so(error: BaseException) -> None:
    failure = failure_of(raised(error))
    assert failure.kind == "model raised" and f"raised {type(error).__name__}: away" in failure.sentence
    assert "BaseException" in failure.hint


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Odd(), Cancelled("a")])
def test_a_step_and_a_job_call_it_the_same(error: BaseException) -> None:
    assert failure_of(error).kind == failure_in_step(error).kind


@pytest.mark.parametrize(
    ("code", "words"),
    [(-11, "SIGSEGV"), (-9, "SIGKILL"), (-250, "signal 250"), (3, "exit code 3"), (None, "fork server")],
)
def test_a_crash_names_the_signal(code: int | None, words: str) -> None:
    failure = crash(code, "measure a.py", "last words")
    assert failure.kind == "crash" and words in failure.sentence and "measure a.py" in failure.sentence
    assert failure.traceback == "last words" and ("memory" in failure.hint) == (code == -9)


@pytest.mark.parametrize(("out_of_memory", "kind"), [(True, "out of memory"), (False, "crash"), (None, "crash")])
def test_a_kill_is_lack_of_memory_only_where_the_system_says_so(out_of_memory: bool | None, kind: str) -> None:
    failure = crash(-9, "measure a.py", "", out_of_memory=out_of_memory)
    assert failure.kind == kind and "SIGKILL" in failure.sentence
    assert crash(-11, "measure a.py", "", out_of_memory=True).kind == "crash"
