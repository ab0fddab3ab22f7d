"""Processes: a pipeline in one process, and a worker that lives on after a device-side assertion ended its job."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from torch import nn

from explorer.engine.model.describe import describe
from explorer.jobs.client import Worker
from explorer.jobs.protocol import Measure
from explorer.pipeline.engine.run import run_pipeline
from explorer.record import Measurement, ModelRef, PipelinePlan, RunSpec
from tests.gpu.kit import Bench


def check_one_process(bench: Bench) -> None:
    spec = bench.spec("mlp")
    chain = describe(spec.model, device=bench.device).chain
    middle = len(chain) // 2
    plan = PipelinePlan(stages=(chain[:middle], chain[middle:]), n_microbatches=4, schedule="GPipe")
    run = run_pipeline(msgspec.structs.replace(spec, plan=plan))
    bench.expect(run.failure is None, run.failure.sentence if run.failure else "")
    bench.figure("actions timed", len(run.actions))
    said = any("imaginary" in note for note in run.notes)
    bench.expect(said == bench.is_imaginary == (not run.gradients), f"{len(run.gradients)} gradients; {run.notes}")


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
