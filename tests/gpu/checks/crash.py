"""What a GPU's own errors may and may not take along: a device-side assertion ends one job, and nothing else."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from explorer.jobs.client import Worker
from explorer.jobs.protocol import Measure
from explorer.record import Measurement, ModelRef, RunSpec
from tests.gpu.kit import Bench


class OutOfRange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids + 100)


def build() -> tuple[nn.Module, torch.Tensor]:
    return OutOfRange(), torch.zeros(8, dtype=torch.int64)


def check_an_assertion_is_a_result_and_the_worker_lives(bench: Bench) -> None:
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
