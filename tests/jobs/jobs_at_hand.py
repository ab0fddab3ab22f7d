"""Jobs of the fake worker: given, waited for, and gone."""

from __future__ import annotations

import time
from pathlib import Path

from explorer.jobs.client import Job, Worker
from explorer.jobs.protocol import Describe, Measure
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec

FAKE = Path(__file__).with_name("fake_worker.py")
LONG_S = 60.0


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
