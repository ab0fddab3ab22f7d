"""The worker: answers every request in a separate, warm and clean process.

In this room only this file imports the engine, inside functions. Only the fork server and its jobs hold torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from msgspec.structs import replace

from explorer.child_process.forks import WARM
from explorer.errors import Cancelled, NotSaved
from explorer.jobs import protocol
from explorer.jobs.run_file import graph_of, is_kept, with_graph
from explorer.jobs.store import Store, make_private_folder
from explorer.record.base import Record, from_msgpack, to_msgpack
from explorer.record.failure import failure_of
from explorer.record.measurement import Measurement
from explorer.record.plan import Progress, Report
from explorer.record.policy import Policy
from explorer.record.run import Ranks, RunSpec


def answer(request: protocol.Request, report: Report) -> Record:
    """The engine's answer to a request, within the memory of the machine. Raises the engine's errors."""
    from explorer.engine.device.memory_limit import machine_memory_limit
    from explorer.engine.device.subprocess_call import one_thread_between_steps

    one_thread_between_steps()
    with machine_memory_limit():
        return _answer(request, report)


def _described(request: protocol.Describe, report: Report) -> Record:
    from explorer.engine.device.without_data import fake_group, without_data
    from explorer.engine.model.describe import describe

    group = fake_group(0, request.n_ranks) if request.n_ranks > 1 else nullcontext()
    with group, without_data() if request.without_data else nullcontext():
        return describe(
            request.model, seed=request.seed, device=request.device, conditions=request.conditions, report=report
        )


def _measured(request: protocol.Measure, report: Report) -> Record:
    from explorer.engine.bench import measure as ways

    if request.own_optimizer:
        from explorer.engine.bench.step import step_with_optimizer

        return ways.measure_without_data(request.spec, report, step_with_optimizer(request.own_optimizer))
    if request.without_data:
        return ways.measure_without_data(request.spec, report)
    if request.beside_keep_all:
        return ways.measure_beside_keep_all(request.spec, report)
    if request.until_it_fits:
        return ways.measure_what_fits(request.spec, report, with_graph=request.with_graph)
    return ways.measure(request.spec, report)


def _plans(request: protocol.FindPlans, report: Report) -> Record:
    from explorer.plan.planners.front import find_plans

    def played(policy: Policy) -> Measurement:
        from explorer.engine.bench.measure import measure_without_data

        spec = replace(request.run.spec, policy=policy)
        if spec == request.run.spec:
            return request.run
        if spec.ranks is not None:
            from explorer.engine.ranks.predict import predict_ranks

            return predict_ranks(spec, report).fullest
        return measure_without_data(spec, report)

    return find_plans(request.run, request.graph, request.wish, report, played)


def _on_ranks(request: protocol.MeasureRanks, report: Report) -> Record:
    if request.without_data:
        from explorer.engine.ranks.predict import predict_ranks

        return predict_ranks(request.spec, report)
    from explorer.engine.ranks.real import measure_ranks

    return measure_ranks(request.spec, report)


def _answer(request: protocol.Request, report: Report) -> Record:
    match request:
        case protocol.Describe():
            return _described(request, report)
        case protocol.Measure():
            return _measured(request, report)
        case protocol.MeasureRanks():
            return _on_ranks(request, report)
        case protocol.Compare(candidate=RunSpec(ranks=Ranks())):
            from explorer.engine.ranks.compare import compare_ranks

            return compare_ranks(request.candidate, report)
        case protocol.Compare():
            from explorer.engine.compare.compare import compare

            return compare(request.baseline, request.candidate, full=request.full, report=report)
        case protocol.DrawAutograd():
            from explorer.engine.bench.other_tools import draw_autograd

            return draw_autograd(request.spec, request.block, report)
        case protocol.FindPlans():
            return _plans(request, report)
        case protocol.RunLab():
            from explorer.lab.run import run_lab

            return run_lab(request.name, request.switches, device=request.device, model=request.model, report=report)
        case protocol.RunPipeline():
            from explorer.engine.pipeline.run import run_pipeline

            return run_pipeline(request.spec, report, profile=request.profile)
        case protocol.OpenRanks():
            from explorer.engine.pipeline.run import open_results

            return open_results(request.spec, Path(request.folder), report)
        case protocol.ProfileStages():
            from explorer.engine.pipeline.profile import profile_blocks

            return profile_blocks(request.spec, request.groups, report, n_microbatches=request.n_microbatches)
        case protocol.FindJointPlan():
            from explorer.plan.planners.joint import joint_plan

            return joint_plan(request.profile, request.graph, request.wish, report)


def needs_of(request: protocol.Request) -> tuple[str, ...]:
    """Modules that the server imports before the job starts. A first graph waits for the first module only."""
    match request:
        case protocol.FindPlans(wish=wish):
            return WARM[: 3 if wish.card else 1]
        case protocol.Describe() | protocol.FindJointPlan() | protocol.Measure(with_graph=True):
            return WARM[:1]
        case protocol.Measure() | protocol.Compare():
            return WARM[:3]
    return WARM


def settings() -> dict[str, str]:
    """Environment variables of the worker, where the person has set none."""
    # cuBLAS reads this once, when CUDA starts; without it equal runs differ.
    chosen = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with contextlib.suppress(OSError):  # without such a folder each job compiles for itself
        # torch.compile loads code from there, so no folder will do in which another user could write first.
        folder = platformdirs.user_cache_path("checkpoint-explorer", appauthor=False) / "torchinductor"
        make_private_folder(folder)
        folder.chmod(0o700)  # refused for another user's folder
        chosen["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return chosen


def do_job(submitted: bytes, store_path: str, folder: str, events: int, cancels: int) -> None:
    """Runs one job, inside the job's process."""
    work(answer, store_path, from_msgpack(submitted, protocol.Submit), folder, (events, cancels))


Answers = Callable[[protocol.Request, Report], Record]


def work(answer: Answers, store_path: str, submitted: protocol.Submit, folder: str, files: tuple[int, int]) -> None:
    """Answers one request; its result is stored before it is announced.

    `folder` takes temporary files; `files` are events and cancels.
    """
    tempfile.tempdir = folder
    with contextlib.suppress(OSError):  # when memory runs out the system shall end this process, not the app
        Path("/proc/self/oom_score_adj").write_text("900")
    events, cancels = os.fdopen(files[0], "wb"), files[1]
    pid, ends_s = os.getpid(), time.monotonic() + protocol.time_limit_s(submitted.request)

    def report(progress: Progress) -> None:
        if os.getpid() != pid:  # a model forked, and its copy of this process came back
            os._exit(0)
        if time.monotonic() > ends_s:
            raise protocol.timed_out(submitted.request)
        if select.select([cancels], [], [], 0)[0]:
            raise Cancelled("The run was cancelled.")
        protocol.write_frame(events, protocol.Reported(progress=progress))

    event = event_of(answer, submitted, store_path, report)
    if os.getpid() == pid:
        protocol.write_frame(events, event)


def event_of(answer: Answers, submitted: protocol.Submit, store_path: str, report: Report) -> protocol.Event:
    """The result of a request, which is in the store then, or the failure."""
    try:
        report(Progress(what="starting", done=0, total=0))
        result = answer(submitted.request, report)
        result = with_graph(result, graph_of(result) or submitted.graph)
        encoded = to_msgpack(result)
        run_id, warning = _keep(result, encoded, store_path) if submitted.keep else (None, "")
        return protocol.Finished(result=encoded, run_id=run_id, warning=warning)
    except BaseException as error:  # a model may raise SystemExit, or its own exception
        return protocol.Failed(failure=failure_of(error, in_step=False))


def _keep(result: Record, encoded: bytes, store_path: str) -> tuple[str | None, str]:
    if not is_kept(result):
        return None, ""
    try:
        return Store(store_path).save(result, encoded=encoded), ""
    except NotSaved as error:
        return None, str(error)


@dataclass(frozen=True)
class WorkerProgram:
    """The function that a job's process runs, and the modules that the fork server imports ahead."""

    run: Callable[[bytes, str, str, int, int], None]
    warm: tuple[str, ...] = ()
    needs: Callable[[protocol.Request], tuple[str, ...]] = lambda request: ()


ENGINE = WorkerProgram(do_job, WARM, needs_of)
