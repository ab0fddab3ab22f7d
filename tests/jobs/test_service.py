"""The worker's side of the pipe: one job at a time, politely cancelled or killed, and no orphan of any."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from explorer.jobs.client import Worker
from tests.jobs.jobs_at_hand import FAKE, LONG_S, begin, describe, finish, wait_gone


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
