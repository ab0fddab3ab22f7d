"""Processes: a pipeline's ranks over NCCL, and a worker that lives on after a device-side assertion ended its job."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from torch import nn

from explorer.engine.model.describe import describe
from explorer.engine.pipeline.run import run_pipeline
from explorer.errors import ExplorerError
from explorer.jobs.client import Worker
from explorer.jobs.protocol import Measure
from explorer.record import Measurement, ModelRef, PipelinePlan, RunSpec
from tests.gpu.kit import Bench


def check_two_ranks(bench: Bench) -> None:
    bench.needs_cuda()
    spec = bench.spec("mlp")
    chain = describe(spec.model, device=bench.device).chain
    middle = len(chain) // 2
    plan = PipelinePlan(stages=(chain[:middle], chain[middle:]), n_microbatches=4, schedule="1F1B")
    spec = msgspec.structs.replace(spec, plan=plan)
    bench.figure("GPUs", torch.cuda.device_count())
    try:
        run = run_pipeline(spec, engine="procs")
    except ExplorerError as refused:
        bench.figure("said", str(refused)[:200])
        bench.expect(torch.cuda.device_count() < 2, f"two GPUs and a refusal: {refused}")
        return
    if run.failure is not None:
        bench.figure("said", run.failure.sentence[:200])
        bench.expect(torch.cuda.device_count() < 2, run.failure.sentence)
        return
    bench.figure("actions timed", len(run.actions))
    bench.expect(all(action.end_ms >= action.start_ms for action in run.actions), "an action ends before it begins")
    if run.wall is not None and run.composed is not None and run.composed.makespan_ms:
        longer = run.wall.makespan_ms / run.composed.makespan_ms
        bench.figure("step over the same actions with links that cost nothing", longer)  # near 1: NCCL is overlapped


def check_one_process(bench: Bench) -> None:
    spec = bench.spec("mlp")
    chain = describe(spec.model, device=bench.device).chain
    middle = len(chain) // 2
    plan = PipelinePlan(stages=(chain[:middle], chain[middle:]), n_microbatches=4, schedule="GPipe")
    run = run_pipeline(msgspec.structs.replace(spec, plan=plan))
    bench.expect(run.failure is None, run.failure.sentence if run.failure else "")
    bench.figure("actions timed", len(run.actions))


class OutOfRange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids + 100)


def build() -> tuple[nn.Module, torch.Tensor]:
    return OutOfRange(), torch.zeros(8, dtype=torch.int64)


def check_an_assertion_is_a_result_and_the_worker_lives(bench: Bench) -> None:
    bench.needs_values()
    worker = Worker()
    try:
        wrong = RunSpec(model=ModelRef(target=f"{Path(__file__).resolve()}:build"), device=bench.device, n_repeats=1)
        job = worker.submit(Measure(spec=wrong))
        job.wait()
        failure = job.failure or (job.result.failure if isinstance(job.result, Measurement) else None)
        bench.expect(failure is not None, "an index out of range was no failure")
        bench.figure("said", failure.sentence[:120] if failure else "nothing")
        job = worker.submit(Measure(spec=bench.spec("gpt")))
        job.wait()
        bench.expect(isinstance(job.result, Measurement) and job.result.failure is None, "the next job failed")
    finally:
        worker.close()
