"""`python -m explorer.jobs.worker --store PATH`: answers every request in a separate, warm and clean process.

In this room only this file imports the engine, inside functions. Only the fork server and its jobs hold torch.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
from contextlib import nullcontext, suppress
from pathlib import Path

import platformdirs
from msgspec.structs import replace

from explorer.child_process.forks import WARM, Forks
from explorer.engine.device.free_memory import n_oom_kills
from explorer.jobs.protocol import (
    Compare,
    Describe,
    DrawAutograd,
    FindJointPlan,
    FindPlans,
    Measure,
    MeasureRanks,
    OpenRanks,
    ProfileStages,
    Request,
    RunLab,
    RunPipeline,
    SaveSnapshot,
    Submit,
)
from explorer.jobs.service import Process, Service
from explorer.jobs.work import work
from explorer.record.base import Record, from_msgpack, to_msgpack
from explorer.record.measurement import Measurement
from explorer.record.plan import Report
from explorer.record.policy import Policy
from explorer.record.ranks import Ranks
from explorer.record.run import RunSpec


def answer(request: Request, report: Report) -> Record:
    """The engine's answer to a request, within the memory of the machine. Raises the engine's errors."""
    from explorer.engine.device.memory_limit import machine_memory_limit

    with machine_memory_limit():
        return _answer(request, report)


def _described(request: Describe, report: Report) -> Record:
    from explorer.engine.device.without_data import without_data
    from explorer.engine.model.describe import describe

    with without_data() if request.without_data else nullcontext():
        return describe(request.model, seed=request.seed, device=request.device, report=report)


def _measured(request: Measure, report: Report) -> Record:
    from explorer.engine.bench import measure as ways

    if request.own_optimizer:
        return ways.measure_without_data(request.spec, report, ways.step_with_optimizer(request.own_optimizer))
    if request.without_data:
        return ways.measure_without_data(request.spec, report)
    if request.beside_keep_all:
        return ways.measure_beside_keep_all(request.spec, report)
    if request.until_it_fits:
        from explorer.engine.bench.what_fits import measure_what_fits

        return measure_what_fits(request.spec, report, with_graph=request.with_graph)
    return ways.measure(request.spec, report)


def _plans(request: FindPlans, report: Report) -> Record:
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


def _on_ranks(request: MeasureRanks, report: Report) -> Record:
    if request.without_data:
        from explorer.engine.ranks.predict import predict_ranks

        return predict_ranks(request.spec, report)
    from explorer.engine.ranks.real import measure_ranks

    return measure_ranks(request.spec, report)


def _answer(request: Request, report: Report) -> Record:
    match request:
        case Describe():
            return _described(request, report)
        case Measure():
            return _measured(request, report)
        case MeasureRanks():
            return _on_ranks(request, report)
        case SaveSnapshot():
            from explorer.engine.bench.other_tools import save_snapshot

            return save_snapshot(request.spec, Path(request.path), report)
        case Compare(candidate=RunSpec(ranks=Ranks())):
            from explorer.engine.ranks.compare import compare_ranks

            return compare_ranks(request.candidate, report)
        case Compare():
            from explorer.engine.compare.compare import compare

            return compare(request.baseline, request.candidate, full=request.full, report=report)
        case DrawAutograd():
            from explorer.engine.bench.other_tools import draw_autograd

            return draw_autograd(request.spec, request.block, report)
        case FindPlans():
            return _plans(request, report)
        case RunLab():
            from explorer.lab.run import run_lab

            return run_lab(request.name, request.switches, device=request.device, model=request.model, report=report)
        case _:
            return _pipeline_answer(request, report)


def _pipeline_answer(request: RunPipeline | OpenRanks | ProfileStages | FindJointPlan, report: Report) -> Record:
    match request:
        case RunPipeline():
            from explorer.engine.pipeline.run import run_pipeline

            return run_pipeline(request.spec, request.engine, report, profile=request.profile)
        case OpenRanks():
            from explorer.engine.pipeline.run import open_results

            return open_results(request.spec, Path(request.folder), report)
        case ProfileStages():
            from explorer.engine.pipeline.profile import profile_blocks

            return profile_blocks(request.spec, request.groups, report, n_microbatches=request.n_microbatches)
        case FindJointPlan():
            from explorer.plan.planners.joint import joint_plan

            return joint_plan(request.profile, request.graph, request.wish, report)


def do_job(submitted: bytes, store_path: str | None, folder: str, events: int, cancels: int) -> None:
    """Runs one job, inside the job's process."""
    work(answer, store_path, from_msgpack(submitted, Submit), folder, (events, cancels))


class Starter:
    """Starts the processes of jobs from a warm fork server; a new server replaces an ended server."""

    def __init__(self, store_path: str | None, *, only_graphs: bool = False) -> None:
        self._store_path = store_path
        self._warm = WARM[:1] if only_graphs else WARM
        self._forks = Forks.launch(self._warm)

    def start(self, submitted: Submit, folder: str, files: tuple[int, int], errors: int) -> Process:
        if not self._forks.alive:
            self._forks = Forks.launch(self._warm)
        what, needs = to_msgpack(submitted), needs_of(submitted.request)
        return self._forks.start(do_job, what, self._store_path, folder, files=files, errors=errors, needs=needs)

    def end(self) -> None:
        self._forks.close()


def needs_of(request: Request) -> tuple[str, ...]:
    """Modules that the server imports before the job starts. A first graph waits for the first module only."""
    match request:
        case FindPlans(wish=wish):
            return WARM[: 3 if wish.card else 1]
        case Describe() | FindJointPlan() | Measure(with_graph=True):
            return WARM[:1]
        case Measure() | Compare() | SaveSnapshot():
            return WARM[:3]
    return WARM


def keep_compiled_code() -> None:
    """Puts torch.compile's cache into a folder of the user's own, which outlives a job's temporary files.

    Code is loaded from there, so no folder will do in which another user could write first.
    """
    with suppress(OSError):  # without such a folder each job compiles for itself
        folder = platformdirs.user_cache_path("checkpoint-explorer", appauthor=False) / "torchinductor"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # refused for another user's folder
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def main() -> None:
    """Serves until stdin ends."""
    parser = argparse.ArgumentParser(prog="python -m explorer.jobs.worker")
    parser.add_argument("--store", help="file of the run store; without it nothing is kept")
    parser.add_argument("--only-graphs", action="store_true", help="other jobs import their modules when they come")
    arguments = parser.parse_args()
    faulthandler.enable()
    # cuBLAS reads this once, when CUDA starts; without it equal runs differ.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    keep_compiled_code()
    starter = Starter(arguments.store, only_graphs=arguments.only_graphs)
    Service(starter.start, starter.end, n_oom_kills).run()


if __name__ == "__main__":
    from explorer.jobs import worker  # under its own name: by that the fork server finds `do_job`

    worker.main()
