"""What a job's process says is passed on, and its end speaks for it where it gave no answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from explorer.errors import Crashed
from explorer.jobs.job_process import JobProcess
from explorer.jobs.protocol import Describe, Event, Failed, Finished, Reported, Submit, write_frame
from explorer.record.graph import ModelRef
from explorer.record.plan import Progress

SUBMITTED = Submit(job="7", request=Describe(model=ModelRef(target="a.py")))
REPORT = Reported(job="7", progress=Progress(what="stepping", done=1, total=2))
ANSWER = Finished(job="7", result=b"")


class Ended:
    """A process that has ended already."""

    def __init__(self, code: int | None) -> None:
        self.code = code
        self.status, writing = os.pipe()
        os.close(writing)  # readable from the beginning
        self.ended = True
        self.closed = False

    def fileno(self) -> int:
        return self.status

    def kill(self) -> None:
        raise AssertionError("it has ended")

    def close(self) -> None:
        os.close(self.status)
        self.closed = True


def started(says: Callable[[Any], object], code: int | None = 0, words: bytes = b"") -> Callable[..., Ended]:
    def start(submitted: Submit, folder: str, files: tuple[int, int], errors: int) -> Ended:
        with os.fdopen(os.dup(files[0]), "wb") as events:
            says(events)
        os.write(errors, words)
        return Ended(code)

    return start


def answer_of(start: Any, heard: list[Event], oom_kills: tuple[int, ...] = ()) -> Event:
    counts = iter(oom_kills)
    job = JobProcess(SUBMITTED, start, "/tmp", lambda: next(counts, None))
    answer = job.answer(heard.append)
    job.close()
    return answer


def test_reports_are_passed_on_and_the_answer_is_returned() -> None:
    heard: list[Event] = []
    says = started(lambda events: [write_frame(events, one) for one in (REPORT, REPORT, ANSWER)])
    assert answer_of(says, heard) == ANSWER and heard == [REPORT, REPORT]


@pytest.mark.parametrize(
    ("code", "oom_kills", "kind", "words"),
    [
        (-11, (0, 0), "crash", "SIGSEGV"),
        (3, (0, 0), "crash", "exit code 3"),
        (-9, (4, 5), "out of memory", ""),
        (-9, (4, 4), "crash", "SIGKILL"),
        (None, (0, 0), "crash", "fork server"),
    ],
)
def test_an_end_without_an_answer_is_one(code: int | None, oom_kills: tuple[int, int], kind: str, words: str) -> None:
    heard: list[Event] = []
    says = started(lambda events: write_frame(events, REPORT), code, b"its last words")
    answer = answer_of(says, heard, oom_kills)
    assert heard == [REPORT] and isinstance(answer, Failed)
    assert answer.failure.kind == kind and words in answer.failure.sentence
    assert kind != "crash" or "its last words" in answer.failure.traceback


def test_what_is_no_message_is_a_crash_that_says_who_wrote() -> None:
    answer = answer_of(started(lambda events: events.write(b"\xff" * 64)), [])
    assert isinstance(answer, Failed) and "The model wrote into the pipe" in answer.failure.sentence


def test_a_fork_server_that_is_gone_is_raised() -> None:
    def gone(*_: object) -> Ended:
        raise Crashed("gone")

    with pytest.raises(Crashed):
        JobProcess(SUBMITTED, gone, "/tmp", lambda: 0)
