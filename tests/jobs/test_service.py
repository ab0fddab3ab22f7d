"""The worker's side of the pipe: whole messages, jobs in order, cancelled or killed, and one answer for each."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.errors import Crashed, UnreadableFile
from explorer.jobs.client import Worker
from explorer.jobs.protocol import (
    DESCRIBE_LIMIT_S,
    CancelJob,
    Command,
    Compare,
    Describe,
    EndJob,
    Event,
    Failed,
    Finished,
    Frames,
    Measure,
    Reported,
    RunLab,
    Submit,
    description_of,
    models_of,
    read_frame,
    time_limit_s,
    write_frame,
)
from explorer.jobs.service import JobProcess
from explorer.record.graph import ModelRef
from explorer.record.plan import Progress
from explorer.record.run import RunSpec
from tests.jobs.samples import FAKE, LONG_S, begin, describe, finish, wait_gone

SPEC = RunSpec(model=ModelRef(target="a.py"), time_limit_s=30.0)
MESSAGES: list[Command] = [
    Submit(job="1", request=Measure(spec=SPEC)),
    CancelJob(job="1"),
    EndJob(job="2"),
    Submit(job="3", request=RunLab(name="dropout", switches={"a": "b"}), keep=False),
]


def stream_of(messages: list[Command]) -> bytes:
    stream = io.BytesIO()
    for message in messages:
        write_frame(stream, message)
    return stream.getvalue()


def test_what_is_written_is_read_and_then_nothing() -> None:
    stream = io.BytesIO(stream_of(MESSAGES))
    assert [read_frame(stream, Command) for _ in range(5)] == [*MESSAGES, None]


@given(st.integers(1, len(stream_of(MESSAGES[:1])) - 1))
def test_a_torn_message_is_refused(n_bytes: int) -> None:
    with pytest.raises(UnreadableFile, match="in the middle of a message"):
        read_frame(io.BytesIO(stream_of(MESSAGES[:1])[:n_bytes]), Command)


@given(st.lists(st.integers(1, 400), max_size=5))
def test_pieces_of_any_size_make_the_same_messages(cuts: list[int]) -> None:
    data, frames = stream_of(MESSAGES), Frames[Command](Command)
    read: list[Command] = []
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for first, last in zip(borders, borders[1:]):
        frames.add(data[first:last])
        while (message := frames.next()) is not None:
            read.append(message)
    assert read == MESSAGES


def test_a_length_that_nobody_means_is_refused_before_it_is_waited_for() -> None:
    frames = Frames[Command](Command)
    frames.add(b"\xff" * 8)
    with pytest.raises(UnreadableFile, match="was announced"):
        frames.next()


def test_the_longest_limit_of_its_runs_counts() -> None:
    longer = RunSpec(model=ModelRef(target="b.py"), time_limit_s=90.0)
    assert time_limit_s(Measure(spec=SPEC)) == 30.0
    assert time_limit_s(Compare(baseline=SPEC, candidate=longer)) == 90.0
    assert time_limit_s(Describe(model=SPEC.model)) == DESCRIBE_LIMIT_S


def test_the_model_of_a_request() -> None:
    assert models_of(Describe(model=SPEC.model)) == models_of(Measure(spec=SPEC)) == [SPEC.model]
    assert description_of(Measure(spec=SPEC)) == "measure a.py" and description_of(RunLab(name="x")) == "runlab"


def test_jobs_wait_for_each_other_in_order(worker: Worker) -> None:
    jobs = [describe(worker, f"steps:{n}") for n in (5, 1, 1)]
    assert worker.open_jobs() == tuple(jobs)
    for job in jobs:
        finish(job)
    assert [job.result is not None for job in jobs] == [True] * 3
    assert worker.open_jobs() == ()


def test_polite_cancel_keeps_the_process(worker: Worker) -> None:
    job = begin(describe(worker, "steps:3000"), "stepping")
    assert worker._child is not None
    pid = worker._child.pid
    job.cancel()
    finish(job)
    assert job.failure is not None and job.failure.kind == "cancelled"
    finish(describe(worker, "next"))
    assert worker._child is not None and worker._child.pid == pid


def test_cancelling_a_waiting_job_leaves_the_working_one_alone(worker: Worker) -> None:
    working = begin(describe(worker, "steps:60"), "stepping")
    waiting = describe(worker, "waiting")
    waiting.cancel()
    finish(waiting)
    assert waiting.failure is not None and waiting.failure.kind == "cancelled" and not waiting.began
    assert finish(working).result is not None


def test_a_late_cancel_does_not_kill_the_next_job(worker: Worker) -> None:
    job = finish(describe(worker, "a"))
    job.cancel()
    following = describe(worker, "steps:30")
    assert finish(following).result is not None and job.result is not None


def test_a_killed_job_leaves_no_grandchild(worker: Worker, tmp_path: Path) -> None:
    job = begin(describe(worker, f"orphan:{tmp_path / 'pids'}"), "orphan")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    job.cancel()
    finish(job)
    wait_gone(*pids)


def test_leftovers_are_removed_and_no_folder_in_the_way_stops_a_run(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others, or nobody's worker, put into the temporary directory under like names."""
    killed = subprocess.Popen(["true"])
    killed.wait()
    odd = ("1abc-x", "99999999999999999999-x", f"{os.getpid()}-lives", "-1-x", "\u0662-x", "0-\udcff", "7", "")
    for name in (*odd, f"{killed.pid}-dead"):
        (tmp_path / f"checkpoint-explorer-{name}").mkdir()
    (tmp_path / f"checkpoint-explorer-{killed.pid}-link").symlink_to(tmp_path / "checkpoint-explorer-7")
    (tmp_path / f"checkpoint-explorer-{killed.pid}-file").write_text("")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    worker = Worker(store_path, command=(sys.executable, str(FAKE), str(store_path)))
    assert finish(describe(worker, "a")).result is not None
    worker.close()
    assert not (tmp_path / f"checkpoint-explorer-{killed.pid}-dead").exists()
    assert all((tmp_path / f"checkpoint-explorer-{name}").exists() for name in odd)


def test_a_killed_app_leaves_no_worker(tmp_path: Path) -> None:
    script = (
        "import sys, time; from explorer.jobs.client import Worker; from explorer.jobs.protocol import Describe;"
        "from explorer.record.graph import ModelRef; store, fake, pids = sys.argv[1:];"
        "worker = Worker(store, command=(sys.executable, fake, store));"
        "worker.submit(Describe(model=ModelRef(target='orphan:' + pids))); time.sleep(60)"
    )
    pids = tmp_path / "pids"
    root = str(FAKE.parents[2])
    app = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "runs.sqlite"), str(FAKE), str(pids)],
        env={**os.environ, "PYTHONPATH": root},
    )
    deadline = time.monotonic() + LONG_S
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < deadline and app.poll() is None
        time.sleep(0.02)
    app.send_signal(signal.SIGKILL)
    app.wait()
    wait_gone(*[int(pid) for pid in pids.read_text().split()])


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
