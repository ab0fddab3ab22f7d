"""A worker whose verbs are small and bad, jobs for it, and runs for the store. Needs no torch.

What each model target does is written in `answer`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from msgspec.structs import replace

from explorer.errors import ModelFailed
from explorer.jobs.client import Job, Worker
from explorer.jobs.protocol import Compare, Describe, FindPlans, Measure, Request, Submit, models_of
from explorer.jobs.worker import WorkerProgram, work
from explorer.record import ROLES, Allocations, Measurement, ModelGraph, ModelRef, PhaseSpan, Policy, RunSpec
from explorer.record.base import Record, column, from_msgpack, to_msgpack
from explorer.record.plan import Progress, Report
from tests.view.builders import HOST


def measurement(request: Measure | Compare) -> Measurement:
    spec = request.spec if isinstance(request, Measure) else request.candidate
    return Measurement(spec=spec, environment=HOST, loss=1.5)


def answer(request: Request, report: Report) -> Record:
    target = next((model.target for model in models_of(request)), "")
    verb, _, value = target.partition(":")
    match verb:
        case "prints":
            print("this is not a message")
            os.write(1, b"neither is this\n")
            sys.stdin.read()
        case "steps":
            for i in range(int(value)):
                part = to_msgpack(measurement(request)) if i == 1 and not isinstance(request, Describe) else b""
                report(Progress(what="stepping", done=i, total=int(value), part=part))
                time.sleep(0.02)
        case "parts":
            assert isinstance(request, Measure)
            graph = ModelGraph(model=request.spec.model, blocks=(), edges=())
            for part in (replace(measurement(request), graph=graph), measurement(request)):
                report(Progress(what="part", done=0, total=0, part=to_msgpack(part)))
        case "waits":
            report(Progress(what="waiting", done=0, total=0))
            while not Path(value).exists():
                time.sleep(0.01)
        case "stuck":
            report(Progress(what="stuck", done=0, total=0))
            time.sleep(60)
        case "raises":
            raise ModelFailed("forward raised", hint="mend it") from RuntimeError("shapes (2, 3)")
        case "bug":
            column(value)
        case "leaves":
            sys.exit(3)
        case "exits":
            print("going", file=sys.stderr, flush=True)
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "orphan":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            Path(value).write_text(f"{os.getpid()} {child.pid}")
            report(Progress(what="orphan", done=1, total=1))
            time.sleep(60)
    if isinstance(request, FindPlans):
        report(Progress(what="solving", done=0, total=0))
        time.sleep(60)
    if isinstance(request, Describe):
        return ModelGraph(model=request.model, blocks=(), edges=())
    assert isinstance(request, Measure | Compare)
    return measurement(request)


def do_job(submitted: bytes, store: str, folder: str, events: int, cancels: int) -> None:
    work(answer, store, from_msgpack(submitted, Submit), folder, (events, cancels))


FAKE = WorkerProgram(do_job)


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
    return Measurement(
        spec=RunSpec(model=ModelRef(target=target, size="small"), policy=Policy.recompute(blocks)),
        environment=HOST,
        allocations=log,
        phases=(PhaseSpan(phase="forward", block="", first_tick=0, end_tick=n + 1),),
    )


def noisy() -> Measurement:
    """A record that zlib cannot make small."""
    record = measured(n=20_000)
    assert record.allocations is not None
    record.allocations.time_ns.extend(int.from_bytes(os.urandom(7), "little") for _ in range(20_000))
    return record
