"""A worker whose verbs are small and bad: what each model target does is written in `answer`. Needs no torch."""

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
from explorer.jobs.protocol import Compare, Describe, FindPlans, Measure, Request, Submit, models_of
from explorer.jobs.worker import WorkerProgram, work
from explorer.record import Environment, Measurement, ModelGraph
from explorer.record.base import Record, column, from_msgpack, to_msgpack
from explorer.record.plan import Progress, Report


def measurement(request: Measure | Compare) -> Measurement:
    spec = request.spec if isinstance(request, Measure) else request.candidate
    environment = Environment(
        device="cpu", device_name="fake", torch_version="none", python_version="3", platform="test", n_threads=1
    )
    return Measurement(spec=spec, environment=environment, loss=1.5)


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
                part = b"" if i or isinstance(request, Describe) else to_msgpack(measurement(request))
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
