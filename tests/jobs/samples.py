"""Jobs of the fake worker (requested, waited for, gone), and runs for the store, small or hard to compress."""

from __future__ import annotations

import os
import time
from pathlib import Path

from explorer.jobs.client import Job, Worker
from explorer.jobs.protocol import Describe, Measure
from explorer.record import ROLES, Allocations, Environment, Measurement, ModelRef, PhaseSpan, Policy, RunSpec
from explorer.record.base import column

LONG_S = 200.0


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


def measured(target: str = "sample_models/gpt.py", *blocks: str, n: int = 3) -> Measurement:
    saved = ROLES.index("saved activation")
    log = Allocations(
        n_ticks=n,
        n_bytes=column(range(1, n + 1)),
        born=column(range(1, n + 1)),
        died=column([n + 1] * n),
        role=column([saved] * n),
        block=column([0] * n),
        op=column([0] * n),
        blocks=("",),
        ops=("aten.mm",),
        time_ns=column(),
    )
    environment = Environment(
        device="cpu", device_name="test", torch_version="2.13.0", python_version="3.11", platform="test", n_threads=1
    )
    return Measurement(
        spec=RunSpec(model=ModelRef(target=target, size="small"), policy=Policy.recompute(blocks)),
        environment=environment,
        allocations=log,
        phases=(PhaseSpan(phase="forward", block="", first_tick=0, end_tick=n + 1),),
    )


def noisy() -> Measurement:
    """A record that zlib cannot make small."""
    record = measured(n=20_000)
    assert record.allocations is not None
    record.allocations.time_ns.extend(int.from_bytes(os.urandom(7), "little") for _ in range(20_000))
    return record
