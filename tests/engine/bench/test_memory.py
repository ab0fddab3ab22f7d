"""Tensors in memory: before a step, at a refusal, under a limit, and down the ladder until a step fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from explorer.engine.bench.measure import measure
from explorer.engine.bench.memory import (
    bytes_before_step,
    memory_at_refusal,
    memory_limit,
    optimizer_tensors,
    storage_bytes,
    tensors_before_step,
)
from explorer.engine.bench.step import prepare, run_step
from explorer.engine.bench.what_fits import measure_what_fits
from explorer.engine.device.device import CpuDevice
from explorer.engine.model.describe import describe
from explorer.errors import OutOfMemory
from explorer.plan.policy.presets import preset
from explorer.plan.predict.baseline import keep_all_from
from explorer.plan.predict.forecaster import Forecaster
from explorer.record import RunSpec
from explorer.record.allocations import ROLES
from explorer.record.plan import Progress, Report
from explorer.view.text.runs import did_not_fit
from tests.engine.tiny_nets import ref
from tests.zoo import sample

CPU = torch.device("cpu")
MIB = 2**20


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_each_tensor_has_a_role_and_the_block_that_holds_it() -> None:
    model, optimizer = trained()
    model[0].seen = torch.zeros(5)
    batch = torch.ones(2, 3)
    known = [(one.role, one.owner, one.tensor) for one in tensors_before_step(model, optimizer, [batch, "text"])]
    roles = {role: [fqn for one, fqn, _ in known if one == role] for role in {role for role, _, _ in known}}
    assert roles == {
        "parameter": ["0", "0", "1", "1"],
        "gradient": ["0", "0", "1", "1"],
        "buffer": ["1", "1", "1", "0"],
        "optimizer state": ["0", "0", "1", "1"],
        "input": [""],
    }
    assert any(tensor is model[0].seen for _, _, tensor in known) and known[-1][2] is batch
    assert optimizer_tensors(model, None) == []


def test_a_storage_counts_once_and_only_on_its_device() -> None:
    model = nn.Linear(3, 4)
    model.again = model.weight
    model.view = model.weight.detach()[:2]
    known = tensors_before_step(model, None, [])
    assert storage_bytes(known, CPU) == (3 * 4 + 4) * 4
    assert storage_bytes(known, torch.device("meta")) == 0


def test_bytes_by_role_and_block_and_why_it_ended() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model(torch.ones(2, 3)).sum().backward()
    kept = torch.zeros(1_000_003)  # reachable, and nobody's
    error = OutOfMemory("No more.", asked_bytes=7)
    run = memory_at_refusal(model, None, CpuDevice(), where="train.py", error=error)
    log = run.allocations
    assert log is not None and run.origin == "recorded" and run.recorded_in == "train.py"
    rows = [(ROLES[role], log.blocks[block], n) for role, block, n in zip(log.role, log.block, log.n_bytes)]
    for fqn, n_elements in (("0", 3 * 4 + 4), ("1", 4 * 5 + 5)):
        for role in ("parameter", "gradient"):
            assert sum(n for one, block, n in rows if (one, block) == (role, fqn)) == 4 * n_elements
    assert ("unattributed", "", 4 * kept.numel()) in rows
    assert run.failure is not None and (run.failure.kind, run.failure.asked_bytes) == ("out of memory", 7)
    assert run.step_peak_bytes is None


def test_parameters_batch_and_then_gradients_and_optimizer_state_are_held() -> None:
    trainee = prepare(RunSpec(model=sample("mlp", n_layers=4)))
    parameters = sum(parameter.nbytes for parameter in trainee.model.parameters())
    buffers = sum(buffer.nbytes for buffer in trainee.model.buffers())
    batch = trainee.inputs.nbytes + trainee.targets.nbytes
    assert bytes_before_step(trainee) == parameters + buffers + batch
    run_step(trainee)
    assert bytes_before_step(trainee) >= 4 * parameters + buffers + batch, "AdamW keeps two moments a parameter"


def test_a_trainee_above_the_limit_is_refused_before_it_steps() -> None:
    trainee = prepare(RunSpec(model=sample("mlp", n_layers=4)))  # under no limit, which might refuse the model itself
    trainee = dataclasses.replace(trainee, spec=msgspec.structs.replace(trainee.spec, memory_limit_bytes=1024))
    with pytest.raises(OutOfMemory, match="the limit is 1,024") as refused, memory_limit(CpuDevice(), trainee):
        raise AssertionError("nothing runs")
    assert refused.value.free_bytes == 0


@pytest.mark.slow
def test_the_run_that_fits_tells_what_the_one_that_did_not_would_have_needed() -> None:
    spec = RunSpec(model=sample("gpt", n_layers=4), n_repeats=0)
    graph = describe(spec.model)
    progresses: list[Progress] = []
    run = measure_what_fits(msgspec.structs.replace(spec, memory_limit_bytes=50 * MIB), progresses.append)
    assert run.failure is None and run.spec.policy == preset("all", graph)
    assert any("everything kept does not fit, now every block recomputed: " in one.what for one in progresses)
    real = measure(spec)
    assert real.step_peak_bytes is not None and real.step_peak_bytes > 70 * MIB
    (refused,) = run.refused
    assert refused.what == "everything kept" and refused.policy == spec.policy
    assert refused.held_peak_bytes is not None and refused.held_peak_bytes < real.step_peak_bytes
    whole = keep_all_from(run, graph)
    assert whole is not None and (whole.origin, whole.step_peak_bytes) == ("predicted", real.step_peak_bytes)
    words = did_not_fit(run, whole)
    assert "everything kept, at least" in words and "then refused" in words and words.endswith("MiB (predicted).")
    half = preset("every-2", graph)
    measured = measure(msgspec.structs.replace(spec, policy=half))
    assert Forecaster(run, graph).forecast(half).step_peak_bytes == pytest.approx(measured.step_peak_bytes, rel=1e-4)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts in this process."""

    def call(function: Any, spec: RunSpec, *, report: Report, what: str) -> Any:
        return function(spec, report)

    monkeypatch.setattr("explorer.engine.bench.what_fits.call_in_subprocess", call)


def test_where_nothing_fits_the_last_attempt_says_so_and_no_figure_looks_whole() -> None:
    """A baseline that ran out of memory has a lower bound and no peak, and nothing is predicted from it.

    In processes of their own: a limit does not count what other tests have freed in this one.
    """
    spec = RunSpec(model=ref("wide", mib=16, depth=3), n_repeats=0, memory_limit_bytes=50 * MIB)
    run = measure_what_fits(spec)
    assert run.failure is not None and run.failure.kind == "out of memory"
    assert [one.what for one in run.refused][:1] == ["everything kept"]
    assert run.step_peak_bytes is None and run.saved_after_forward_bytes is None and run.times is None
    assert {run.headlines()[name] for name in ("step_peak_bytes", "step_ms", "forward_flops")} == {None}
    assert keep_all_from(run) is None
    assert did_not_fit(run, None).endswith("then refused.")


def test_what_fits_is_measured_once() -> None:
    progresses: list[Progress] = []
    run = measure_what_fits(RunSpec(model=ref("wide", mib=1, depth=2), n_repeats=0), progresses.append)
    assert run.failure is None and run.refused == () and not run.spec.policy.units
    assert did_not_fit(run, None) == ""
    assert not any("does not fit" in one.what for one in progresses)


def test_another_failure_is_no_reason_to_go_down(here: None) -> None:
    run = measure_what_fits(RunSpec(model=ref("raises"), n_repeats=0))
    assert run.failure is not None and (run.failure.kind, run.refused) == ("model raised", ())
