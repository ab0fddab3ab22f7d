"""The worker's life as the app sees it: progress, cancel, crash, time-out, no orphan. Only the verbs are fake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from explorer.jobs.client import Job, Worker
from explorer.jobs.protocol import Describe, Measure
from explorer.jobs.store import Store
from explorer.record.graph import ModelGraph, ModelRef
from explorer.record.measurement import Measurement
from explorer.record.run import RunSpec

FAKE = Path(__file__).with_name("fake_worker.py")
LONG_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs.sqlite"


@pytest.fixture
def worker(store: Path) -> Iterator[Worker]:
    worker = Worker(store, command=(sys.executable, str(FAKE), str(store)), grace_s=0.3)
    yield worker
    worker.close()


def describe(worker: Worker, target: str) -> Job:
    return worker.submit(Describe(model=ModelRef(target=target)))


def measure(worker: Worker, target: str, **fields: object) -> Job:
    return worker.submit(Measure(spec=RunSpec(model=ModelRef(target=target), **fields)))  # type: ignore[arg-type]


def finish(job: Job) -> Job:
    assert job.wait(LONG_S), f"{job.request} did not finish: {job.progress}"
    return job


def begin(job: Job, what: str) -> Job:
    deadline = time.monotonic() + LONG_S
    while job.progress.what != what:
        assert time.monotonic() < deadline and not job.finished, job.failure
        time.sleep(0.01)
    return job


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(*pids: int) -> None:
    deadline = time.monotonic() + LONG_S
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.01)


def test_a_result_arrives_and_one_process_serves_all(worker: Worker) -> None:
    first = finish(describe(worker, "a"))
    pid = worker._child.pid if worker._child else None
    second = finish(describe(worker, "b"))
    assert isinstance(first.result, ModelGraph) and first.result.model.target == "a"
    assert second.result is not None and second.failure is None
    assert worker._child is not None and worker._child.pid == pid
    assert worker.job(first.id) is first and first.id != second.id
    assert 0 < first.elapsed_s == first.elapsed_s


def test_progress_arrives(worker: Worker) -> None:
    job = describe(worker, "steps:20")
    seen = set()
    while not job.wait(0.005):
        seen.add(job.progress.done)
    assert len(seen) > 5 and job.progress.total == 20 and job.began


def test_a_model_that_prints_or_reads_stdin_disturbs_nothing(worker: Worker) -> None:
    assert finish(describe(worker, "prints")).result is not None


def test_jobs_wait_for_each_other_in_order(worker: Worker) -> None:
    jobs = [describe(worker, f"steps:{n}") for n in (5, 1, 1)]
    assert worker.open_jobs() == tuple(jobs)
    for job in jobs:
        finish(job)
    assert [job.result is not None for job in jobs] == [True] * 3
    assert worker.open_jobs() == ()


@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        ("raises", "model raised", "forward raised"),
        ("bug:key", "internal", "KeyError: 'key'"),
        ("leaves", "model raised", "sys.exit(3)"),
    ],
)
def test_an_exception_is_a_result_and_the_worker_lives(worker: Worker, target: str, kind: str, words: str) -> None:
    job = finish(describe(worker, target))
    assert job.failure is not None and job.failure.kind == kind
    assert words in job.failure.sentence and "fake_worker.py" in job.failure.traceback
    pid = worker._child.pid if worker._child else None
    assert finish(describe(worker, "next")).result is not None
    assert worker._child is not None and worker._child.pid == pid


@pytest.mark.parametrize(
    ("target", "words", "trace"),
    [
        ("segfault", "SIGSEGV", "fake_worker.py"),
        ("killed", "SIGKILL", ""),
        ("exits", "exit code 3", "going"),
    ],
)
def test_a_crash_is_a_result_and_the_next_run_works(worker: Worker, target: str, words: str, trace: str) -> None:
    job, waiting = describe(worker, target), describe(worker, "waiting")
    finish(job)
    assert job.failure is not None and job.failure.kind == "crash"
    assert words in job.failure.sentence and target in job.failure.sentence and trace in job.failure.traceback
    assert finish(waiting).result is not None, "a job that had not begun is handed to the next worker"


def test_a_worker_that_cannot_start_is_tried_twice_and_says_why(store: Path) -> None:
    worker = Worker(store, command=(sys.executable, "-c", "raise SystemExit('no torch here')"))
    job = finish(describe(worker, "a"))
    assert job.failure is not None and job.failure.kind == "crash" and "no torch here" in job.failure.traceback


def test_polite_cancel_keeps_the_process(worker: Worker) -> None:
    job = begin(describe(worker, "steps:3000"), "stepping")
    assert worker._child is not None
    pid = worker._child.pid
    job.cancel()
    finish(job)
    assert job.failure is not None and job.failure.kind == "cancelled"
    finish(describe(worker, "next"))
    assert worker._child is not None and worker._child.pid == pid


def test_a_job_that_does_not_listen_is_killed_after_the_grace(worker: Worker) -> None:
    job = begin(describe(worker, "stuck"), "stuck")
    waiting = describe(worker, "waiting")
    job.cancel()
    finish(job)
    assert job.failure is not None and job.failure.kind == "cancelled"
    assert finish(waiting).result is not None


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


@pytest.mark.parametrize("target", ["steps:3000", "stuck"])
def test_the_time_limit_ends_a_run(worker: Worker, target: str) -> None:
    job = finish(measure(worker, target, time_limit_s=0.2))
    assert job.failure is not None and job.failure.kind == "time-out" and "0.2 s" in job.failure.sentence


def test_a_finished_run_is_in_the_store_before_the_job_is_finished(worker: Worker, store: Path) -> None:
    job = finish(measure(worker, "a"))
    assert job.run_id is not None and Store(store).load(job.run_id) == job.result
    assert isinstance(job.result, Measurement) and job.result.loss == 1.5
    unkept = finish(worker.submit(job.request, keep=False))
    assert unkept.result == job.result and unkept.run_id is None
    assert [run.run_id for run in Store(store).list()] == [job.run_id]


def test_a_run_that_cannot_be_saved_is_shown_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = tmp_path / "file" / "runs.sqlite"
    worker = Worker(store, command=(sys.executable, str(FAKE), str(store)))
    job = finish(measure(worker, "a"))
    worker.close()
    assert job.result is not None and job.run_id is None and "could not be saved" in job.warning


def test_a_killed_job_leaves_no_grandchild(worker: Worker, tmp_path: Path) -> None:
    job = begin(describe(worker, f"orphan:{tmp_path / 'pids'}"), "orphan")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    job.cancel()
    finish(job)
    wait_gone(*pids)


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


def test_close_ends_open_jobs_and_the_process(store: Path) -> None:
    worker = Worker(store, command=(sys.executable, str(FAKE), str(store)))
    job = begin(describe(worker, "stuck"), "stuck")
    assert worker._child is not None
    pid = worker._child.pid
    worker.close()
    finish(job)
    assert job.failure is not None and job.failure.kind == "cancelled"
    wait_gone(pid)
    late = finish(describe(worker, "late"))
    assert late.failure is not None and late.failure.kind == "cancelled"
