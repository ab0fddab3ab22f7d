"""One training step: options, borders, a world left as found, and tensors in memory down to a limit."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from explorer.engine.bench.measure import measure, measure_what_fits
from explorer.engine.bench.memory import (
    bytes_before_step,
    memory_at_refusal,
    memory_limit,
    optimizer_tensors,
    storage_bytes,
    tensors_before_step,
)
from explorer.engine.bench.step import forward_backward, prepare, run_step, split
from explorer.engine.device.device import CpuDevice
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.engine.model.loaded import types_of
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import BadInput, NotOnThisDevice, OutOfMemory
from explorer.plan.policy.presets import preset
from explorer.plan.predict.baseline import keep_all_from
from explorer.record import ModelRef, Policy, RunSpec
from explorer.record.allocations import ROLES
from explorer.record.plan import Progress, Report
from explorer.view.text.runs import did_not_fit
from tests.engine import trap_nets
from tests.engine.tiny_nets import ref
from tests.zoo import sample


def gradients(spec: RunSpec) -> dict[str, torch.Tensor]:
    with preserve_global_state():
        trainee = prepare(spec)
        forward_backward(trainee)
    return {name: p.grad for name, p in trainee.model.named_parameters() if p.grad is not None}


def test_equal_specs_give_bitwise_equal_steps_of_a_copy() -> None:
    spec = RunSpec(model=ref("gpt"), frozen=("blocks.0", "head.weight"))
    loaded = load(spec.model)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    with preserve_global_state():
        trainee = prepare(spec, loaded)
        run_step(trainee)
    assert all(torch.equal(before[name], value) for name, value in loaded.model.state_dict().items())
    assert not torch.equal(before["norm.weight"], trainee.model.state_dict()["norm.weight"])
    first, again = gradients(spec), {name: p.grad for name, p in trainee.model.named_parameters() if p.grad is not None}
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(name.startswith("blocks.0.") or name == "head.weight" for name in first)


def test_microbatches_add_up_to_the_whole_batch() -> None:
    spec = RunSpec(model=ref("gpt", dropout=0.0), dtype="float64")
    whole, parts = gradients(spec), gradients(msgspec.structs.replace(spec, n_accumulation=2))
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-9, atol=1e-12)


def test_forward_alone_keeps_nothing_and_has_the_same_loss() -> None:
    phases: list[str] = []
    trainee = prepare(RunSpec(model=ref("chain"), forward_only=True))
    loss = run_step(trainee, phases.append)
    assert phases == ["forward"] and trainee.optimizer is None
    assert all(parameter.grad is None for parameter in trainee.model.parameters())
    assert loss == run_step(prepare(RunSpec(model=ref("chain"))))
    frozen = prepare(RunSpec(model=ref("chain"), forward_only=True, frozen=("",)))  # nothing needs to be trained
    assert run_step(frozen) == loss


def test_sgd_moves_by_the_learning_rate_and_autocast_computes_in_the_other_type() -> None:
    types: list[torch.dtype] = []
    with preserve_global_state():
        spec = RunSpec(model=ref("chain"), optimizer="sgd", learning_rate=0.5, autocast="bfloat16")
        trainee = prepare(spec)
        layer: nn.Module = trainee.model[0][0]  # type: ignore[index]
        layer.register_forward_hook(lambda module, args, out: types.append(out.dtype))
        before = [p.detach().clone() for p in trainee.model.parameters()]
        run_step(trainee)
    assert types == [torch.bfloat16]
    for old, new in zip(before, trainee.model.parameters()):
        torch.testing.assert_close(new.detach(), old - 0.5 * new.grad)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt", {"frozen": ("blocks.9", "nothing")}, "blocks.9, nothing.*Did you mean blocks"),
    ("gpt", {"frozen": ("",)}, "trains nothing"),
    *(("gpt", {"n_accumulation": n}, f"batch of 4 samples .* {n} equal") for n in (0, 3, 8)),
    ("chain", {"forward_only": True, "policy": Policy.recompute(["0"])}, "forward alone and recomputes 1 units"),
    ("chain", {"device": "cuda"}, "finds no CUDA device"),
]


@pytest.mark.parametrize(("net", "options", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_cannot_be_stepped_is_refused(
    net: str, options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with preserve_global_state(), pytest.raises((BadInput, NotOnThisDevice), match=words):
        prepare(RunSpec(model=ref(net), **options))


def test_split_makes_views_and_leaves_other_tensors_whole() -> None:
    batch, mask = torch.arange(12).reshape(4, 3), torch.ones(3, 3)
    parts = split({"x": batch, "mask": mask}, None, 2)
    assert [part["x"].tolist() for part, _ in parts] == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert all(part["x"].untyped_storage()._cdata == batch.untyped_storage()._cdata for part, _ in parts)
    assert all(part["mask"] is mask for part, _ in parts)


def test_train_mode_leaves_a_frozen_batch_norm_alone() -> None:
    spec = RunSpec(model=ref("convolutions"))
    loaded = load(spec.model)
    loaded.model.norm.eval()
    with preserve_global_state():
        kept = prepare(spec, loaded).model
        whole = prepare(RunSpec(model=spec.model, mode="eval"), loaded).model
    assert kept.training and not kept.norm.training  # type: ignore[union-attr]
    assert not any(module.training for module in whole.modules())


NETS = {"complex_filter": {"float32", "complex64"}, "doubles": {"float32", "float64"}, "half": {"bfloat16"}}


@pytest.mark.parametrize("net", NETS)
def test_nothing_is_cast_unless_the_spec_asks(net: str) -> None:
    spec = RunSpec(model=trap_nets.ref(net))
    loaded = load(spec.model)
    with preserve_global_state():
        ran = prepare(spec, loaded)
    prepared, given = ran.model.state_dict(), loaded.model.state_dict()
    assert all(torch.equal(prepared[name], tensor) for name, tensor in given.items())
    assert {str(tensor.dtype).removeprefix("torch.") for tensor in prepared.values()} == NETS[net]
    assert ran.inputs.dtype == loaded.inputs.dtype
    parameters = {parameter.dtype for parameter in ran.model.parameters()}
    assert len(types_of(ran.model).split(", ")) == len(parameters), "the types that ran are named"


def test_complex_numbers_stay_complex_at_the_precision_asked_for() -> None:
    with preserve_global_state():
        model = prepare(RunSpec(model=trap_nets.ref("complex_filter"), dtype="float64")).model
    weight = model.get_parameter("1.trap.weight")
    assert weight.dtype is torch.complex128 and bool((weight.imag == 1).all())
    assert model.get_parameter("0.weight").dtype is torch.float64


MIB = 2**20


def test_each_tensor_has_a_role_and_the_block_that_holds_it() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.ones(2, 3)
    model(batch).sum().backward()
    optimizer.step()
    model[0].seen = torch.zeros(5)
    tensors = [(one.role, one.owner, one.tensor) for one in tensors_before_step(model, optimizer, [batch, "text"])]
    roles = {role: [fqn for one, fqn, _ in tensors if one == role] for role, _, _ in tensors}
    assert roles == {
        "parameter": ["0", "0", "1", "1"],
        "gradient": ["0", "0", "1", "1"],
        "buffer": ["1", "1", "1", "0"],
        "optimizer state": ["0", "0", "1", "1"],
        "input": [""],
    }
    assert any(tensor is model[0].seen for _, _, tensor in tensors) and tensors[-1][2] is batch
    assert optimizer_tensors(model, None) == []


def test_a_storage_counts_once_and_only_on_its_device() -> None:
    model = nn.Linear(3, 4)
    model.again = model.weight
    model.view = model.weight.detach()[:2]
    tensors = tensors_before_step(model, None, [])
    assert storage_bytes(tensors, torch.device("cpu")) == (3 * 4 + 4) * 4
    assert storage_bytes(tensors, torch.device("meta")) == 0


def test_bytes_by_role_and_block_and_why_it_ended() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model(torch.ones(2, 3)).sum().backward()
    kept, teacher = torch.zeros(1_000_003), nn.Linear(101, 103)  # reachable; the first belongs to no model
    error = OutOfMemory("No more.", asked_bytes=7)
    run = memory_at_refusal(model, None, CpuDevice(), where="train.py", error=error)
    log = run.allocations
    assert log is not None and run.origin == "recorded" and run.recorded_in == "train.py"
    rows = [(ROLES[role], log.blocks[block], n) for role, block, n in zip(log.role, log.block, log.n_bytes)]
    for fqn, n_elements in (("0", 3 * 4 + 4), ("1", 4 * 5 + 5)):
        for role in ("parameter", "gradient"):
            assert sum(n for one, block, n in rows if (one, block) == (role, fqn)) == 4 * n_elements
    assert ("unattributed", "", 4 * kept.numel()) in rows
    assert ("parameter", "", 4 * teacher.weight.numel()) in rows
    assert run.failure is not None and (run.failure.kind, run.failure.asked_bytes) == ("out of memory", 7)
    assert run.step_peak_bytes is None


def test_bytes_between_steps_count_towards_the_limit() -> None:
    trainee = prepare(RunSpec(model=sample("mlp", n_layers=4)))  # under no limit, which might refuse the model itself
    parameters = sum(parameter.nbytes for parameter in trainee.model.parameters())
    rest = sum(tensor.nbytes for tensor in (*trainee.model.buffers(), trainee.inputs, trainee.targets))
    assert bytes_before_step(trainee) == parameters + rest
    run_step(trainee)
    assert bytes_before_step(trainee) >= 4 * parameters + rest, "AdamW keeps two moments a parameter"
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


@pytest.mark.parametrize(("model", "failure"), [(ref("wide", mib=1, depth=2), None), (ref("raises"), "model raised")])
def test_what_fits_or_fails_otherwise_is_measured_once(
    model: ModelRef, failure: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(function: Any, spec: RunSpec, *, report: Report, what: str) -> Any:
        return function(spec, report)

    monkeypatch.setattr("explorer.engine.bench.measure.call_in_subprocess", call)
    progresses: list[Progress] = []
    run = measure_what_fits(RunSpec(model=model, n_repeats=0), progresses.append)
    assert (run.failure.kind if run.failure else None) == failure
    assert run.refused == () and not run.spec.policy.units and did_not_fit(run, None) == ""
    assert not any("does not fit" in one.what for one in progresses)
