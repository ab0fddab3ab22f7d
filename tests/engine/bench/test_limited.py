"""A limit counts what lies in memory before the step: the peak that is measured is what it is held against."""

from __future__ import annotations

import platform

import msgspec
import pytest

from explorer.engine.bench.measure import measure
from explorer.engine.bench.memory import held_bytes, memory_limit
from explorer.engine.bench.step import prepare, run_step
from explorer.engine.device.device import CpuDevice
from explorer.engine.device.subprocess_call import call_in_subprocess
from explorer.errors import OutOfMemory
from explorer.record import ModelRef, RunSpec
from explorer.record.plan import Report, silent

MIB = 2**20


def test_parameters_batch_and_then_gradients_and_optimizer_state_are_held() -> None:
    trainee = prepare(RunSpec(model=ModelRef(target="sample_models/mlp.py", size="small")))
    parameters = sum(parameter.nbytes for parameter in trainee.model.parameters())
    buffers = sum(buffer.nbytes for buffer in trainee.model.buffers())
    batch = trainee.inputs.nbytes + trainee.targets.nbytes
    assert held_bytes(trainee) == parameters + buffers + batch
    run_step(trainee)
    assert held_bytes(trainee) >= 4 * parameters + buffers + batch, "AdamW keeps two moments a parameter"


def test_a_trainee_above_the_limit_is_refused_before_it_steps() -> None:
    trainee = prepare(RunSpec(model=ModelRef(target="sample_models/mlp.py", size="small"), memory_limit_bytes=1024))
    with pytest.raises(OutOfMemory, match="the limit is 1,024") as refused, memory_limit(CpuDevice(), trainee):
        raise AssertionError("nothing runs")
    assert refused.value.free_bytes == 0


def measured(spec: RunSpec, _: Report) -> int | None:
    run = measure(spec)
    return None if run.failure is not None else run.step_peak_bytes


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc lets holes be left out")
def test_a_step_fits_above_its_measured_peak_and_is_refused_below_it() -> None:
    """A GPT, half of whose step is parameters, gradients and moments. Each run in a process of its own: a hole that
    steps without a limit have left may be filled."""
    model = ModelRef(target="sample_models/gpt.py", size="small", arguments={"batch": 1, "n_layers": 4})
    spec = RunSpec(model=model, n_repeats=0)
    peak = call_in_subprocess(measured, spec, report=silent, what="measured its peak")
    assert peak is not None
    for limit, fits in ((peak - 2 * MIB, False), (peak + 3 * MIB, True)):
        limited = msgspec.structs.replace(spec, memory_limit_bytes=limit)
        again = call_in_subprocess(measured, limited, report=silent, what="ran around its peak")
        assert again == (peak if fits else None)
