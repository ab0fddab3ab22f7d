"""Exceptions become failures: of which kind, in which words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from explorer.engine.device.memory_limit import failure_in_step
from explorer.errors import ModelFailed, OutOfMemory
from explorer.jobs.protocol import Compare, Describe, DrawAutograd, Measure, Request
from explorer.jobs.worker import answer
from explorer.pipeline.jobs import ProfileStages, RunPipeline
from explorer.record import Comparison, ModelRef, PipelinePlan, Policy, Record, RunSpec
from explorer.record.failure import Failure, failure_of
from explorer.record.plan import silent


def failure_in_job(error: BaseException) -> Failure:
    return failure_of(error, in_step=False)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."),
    OutOfMemory("full"),
]


@pytest.mark.parametrize("error", MEMORY)
@pytest.mark.parametrize("wrapper", [None, ValueError("b"), ModelFailed("b"), GeneratorExit("b")], ids=repr)
def test_memory_that_ran_out_is_found_behind_any_error(error: BaseException, wrapper: BaseException | None) -> None:
    """Also where a model wraps it in an error of its own."""
    thrown = error if wrapper is None else raised(wrapper, error)
    assert {failure_in_step(thrown).kind, failure_in_job(thrown).kind} == {"out of memory"}


SOURCE = """
import torch
from torch import nn

ERRORS = {"key": KeyError("no"), "exit": SystemExit(3), "interrupt": KeyboardInterrupt(),
          "memory": RuntimeError("std::bad_alloc")}

class Raising(nn.Linear):
    def forward(self, x):
        raise self.error

class Wrapping(nn.Sequential):
    def forward(self, x):
        try:
            return super().forward(x)
        except Exception as error:
            raise ValueError("wrapped") from error

def build(error, wrapped):
    net = (Wrapping if wrapped else nn.Sequential)(nn.Linear(4, 4), Raising(4, 4))
    net[1].error = ERRORS[error]
    return net, torch.randn(8, 4)
"""
FORWARD_RAISES = {"key": "model raised", "exit": "model raised", "interrupt": "cancelled",
                  "memory": "out of memory"}  # fmt: skip


def requests(model: ModelRef) -> Iterator[Request]:
    """Everything that runs a model."""
    spec = RunSpec(model=model, n_repeats=1, optimizer="none")
    plan = PipelinePlan(stages=(("0",), ("1",)), n_microbatches=2, schedule="GPipe")
    yield Describe(model=model)
    yield Measure(spec=spec)
    yield Measure(spec=spec, without_data=True)
    yield Compare(baseline=spec, candidate=msgspec.structs.replace(spec, policy=Policy.recompute(["0"])))
    yield DrawAutograd(spec=spec, block="0")
    yield RunPipeline(spec=msgspec.structs.replace(spec, plan=plan))
    yield ProfileStages(spec=spec, groups=plan.stages, n_microbatches=2)


def failure_when(request: Request) -> Failure | None:
    """As the job raised it, or as its result tells it."""
    try:
        result: Record = answer(request, silent)
    except BaseException as error:
        return failure_in_job(error)
    if isinstance(result, Comparison):
        return result.baseline.failure or result.candidate.failure
    return getattr(result, "failure")  # noqa: B009 (records of several kinds)


@pytest.mark.parametrize(
    ("error", "wrapped"), [*((error, False) for error in sorted(FORWARD_RAISES)), ("memory", True)]
)
def test_what_a_forward_raises_is_of_one_kind_whatever_job_ran_it(error: str, wrapped: bool, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SOURCE)
    model = ModelRef(target=f"{tmp_path / 'net.py'}:build", arguments={"error": error, "wrapped": wrapped})
    told = {type(request).__name__: failure_when(request) for request in requests(model)}
    assert {name: one and one.kind for name, one in told.items()} == dict.fromkeys(told, FORWARD_RAISES[error])
