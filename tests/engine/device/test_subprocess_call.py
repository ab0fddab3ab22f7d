"""What a process of its own returns, says and raises arrives here; how it died is told in words."""

from __future__ import annotations

import os
import signal

import pytest

from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.errors import BadInput, Cancelled, Crashed
from explorer.record.plan import Progress, Report, silent


def counts(up_to: int, report: Report) -> tuple[int, int]:
    for number in range(up_to):
        report(Progress(what="counting", done=number, total=up_to))
    return os.getpid(), sum(range(up_to))


def refuses(why: str, report: Report) -> None:
    raise BadInput(f"This cannot be done: {why}.", hint="Ask for less.")


def dies(report: Report) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def stays(report: Report) -> None:
    signal.pause()


def test_it_runs_elsewhere_and_what_it_says_and_returns_arrives() -> None:
    heard: list[Progress] = []
    answer = call_in_subprocess(counts, 4, report=heard.append, what="counts")
    assert answer is not None
    assert answer[0] != os.getpid() and answer[1] == 6
    counted = [progress.done for progress in heard if progress.what == "counting"]
    assert list(dict.fromkeys(counted)) == [0, 1, 2, 3]


def test_what_it_refuses_is_refused_here_with_its_hint() -> None:
    with pytest.raises(BadInput, match="cannot be done: too large") as refused:
        call_in_subprocess(refuses, "too large", report=silent, what="asks")
    assert refused.value.hint == "Ask for less."


def test_an_end_without_an_answer_says_what_it_did_and_how_it_ended() -> None:
    with pytest.raises(Crashed, match="The run that breaks ended the process by SIGSEGV"):
        call_in_subprocess(dies, report=silent, what="breaks")
    with pytest.raises(Crashed, match="The run that waits was not done after 0 s"):
        call_in_subprocess(stays, report=silent, what="waits", limit_s=0)


def test_whoever_listens_may_end_it() -> None:
    def cancel(progress: Progress) -> None:
        raise Cancelled("Cancelled.")

    with pytest.raises(Cancelled):
        call_in_subprocess(stays, report=cancel, what="waits")
