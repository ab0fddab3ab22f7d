"""One training step: options, borders, and a world left as found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from explorer.engine.bench.step import forward_backward, prepare, run_step, split
from explorer.engine.model.load import load
from explorer.engine.model.loaded import types_of
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import BadInput, NotOnThisDevice
from explorer.record import Policy, RunSpec
from tests.engine import trap_nets
from tests.engine.tiny_nets import ref

BLOCKS = [f"blocks.{i}" for i in range(4)]


def gradients(spec: RunSpec) -> dict[str, torch.Tensor]:
    with preserve_global_state():
        trainee = prepare(spec)
        forward_backward(trainee)
    return {name: p.grad for name, p in trainee.model.named_parameters() if p.grad is not None}


def test_equal_specs_give_bitwise_equal_steps() -> None:
    first, again = gradients(RunSpec(model=ref("gpt"))), gradients(RunSpec(model=ref("gpt")))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_another_seed_gives_another_step() -> None:
    first, other = gradients(RunSpec(model=ref("gpt"))), gradients(RunSpec(model=ref("gpt"), seed=1))
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_a_loaded_model_is_copied_not_trained() -> None:
    spec = RunSpec(model=ref("gpt"))
    loaded = load(spec.model)
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    with preserve_global_state():
        trainee = prepare(spec, loaded)
        run_step(trainee)
    assert all(torch.equal(before[name], value) for name, value in loaded.model.state_dict().items())
    assert not torch.equal(before["head.weight"], trainee.model.state_dict()["head.weight"])


def test_microbatches_add_up_to_the_whole_batch() -> None:
    whole = gradients(RunSpec(model=ref("gpt", dropout=0.0), dtype="float64"))
    parts = gradients(RunSpec(model=ref("gpt", dropout=0.0), dtype="float64", n_accumulation=2))
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-9, atol=1e-12)


def test_borders_are_announced_in_order() -> None:
    phases: list[str] = []
    with preserve_global_state():
        run_step(prepare(RunSpec(model=ref("gpt"), n_accumulation=2)), phases.append)
    assert phases == ["forward", "backward", "forward", "backward", "optimizer"]


def test_backward_only_moves_nothing() -> None:
    with preserve_global_state():
        trainee = prepare(RunSpec(model=ref("chain"), optimizer="none"))
        before = [p.clone() for p in trainee.model.parameters()]
        run_step(trainee)
    assert all(torch.equal(a, b) for a, b in zip(before, trainee.model.parameters()))


def test_forward_alone_keeps_nothing_and_says_the_same_loss() -> None:
    whole, alone = RunSpec(model=ref("chain")), RunSpec(model=ref("chain"), forward_only=True)
    phases: list[str] = []
    trainee = prepare(alone)
    loss = run_step(trainee, phases.append)
    assert phases == ["forward"] and trainee.optimizer is None
    assert all(parameter.grad is None for parameter in trainee.model.parameters())
    assert loss == run_step(prepare(whole))
    frozen = prepare(RunSpec(model=ref("chain"), forward_only=True, frozen=("",)))  # nothing needs to be trained
    assert run_step(frozen) == loss


def test_a_policy_for_forward_alone_is_refused() -> None:
    with pytest.raises(BadInput, match="forward alone and recomputes 1 units: nothing runs again"):
        prepare(RunSpec(model=ref("chain"), forward_only=True, policy=Policy.recompute(["0"])))


def test_sgd_moves_by_the_learning_rate() -> None:
    with preserve_global_state():
        trainee = prepare(RunSpec(model=ref("chain"), optimizer="sgd", learning_rate=0.5))
        before = [p.detach().clone() for p in trainee.model.parameters()]
        run_step(trainee)
    for old, new in zip(before, trainee.model.parameters()):
        assert new.grad is not None
        torch.testing.assert_close(new.detach(), old - 0.5 * new.grad)


def test_frozen_blocks_get_no_gradient() -> None:
    by_name = gradients(RunSpec(model=ref("gpt"), frozen=("blocks.0", "head.weight")))
    assert by_name and not any(name.startswith("blocks.0.") or name == "head.weight" for name in by_name)


def test_every_unknown_frozen_name_is_told_with_the_nearest() -> None:
    with preserve_global_state(), pytest.raises(BadInput, match="blocks.9, nothing.*Did you mean blocks"):
        prepare(RunSpec(model=ref("gpt"), frozen=("blocks.9", "nothing")))


def test_freezing_everything_is_refused() -> None:
    with preserve_global_state(), pytest.raises(BadInput, match="trains nothing"):
        prepare(RunSpec(model=ref("gpt"), frozen=("",)))


@pytest.mark.parametrize("n_parts", [0, 3, 8])
def test_a_batch_that_cannot_be_divided_is_refused(n_parts: int) -> None:
    with preserve_global_state(), pytest.raises(BadInput, match=f"batch of 4 samples .* {n_parts} equal"):
        prepare(RunSpec(model=ref("gpt"), n_accumulation=n_parts))


def test_split_makes_views_and_leaves_other_tensors_whole() -> None:
    batch, mask = torch.arange(12).reshape(4, 3), torch.ones(3, 3)
    parts = split({"x": batch, "mask": mask}, None, 2)
    assert [part["x"].tolist() for part, _ in parts] == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    assert all(part["x"].untyped_storage()._cdata == batch.untyped_storage()._cdata for part, _ in parts)
    assert all(part["mask"] is mask for part, _ in parts)


def test_train_mode_leaves_a_frozen_batch_norm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec(model=ref("convolutions"))
    loaded = load(spec.model)
    loaded.model.norm.eval()
    with preserve_global_state():
        kept = prepare(spec, loaded).model
        whole = prepare(RunSpec(model=spec.model, mode="eval"), loaded).model
    assert kept.training and not kept.norm.training  # type: ignore[union-attr]
    assert not any(module.training for module in whole.modules())


def test_autocast_computes_in_the_other_type() -> None:
    seen: list[torch.dtype] = []
    with preserve_global_state():
        trainee = prepare(RunSpec(model=ref("chain"), autocast="bfloat16"))
        layer: nn.Module = trainee.model[0][0]  # type: ignore[index]
        layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        run_step(trainee)
    assert seen == [torch.bfloat16]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_a_gpu_says_so() -> None:
    with pytest.raises(NotOnThisDevice, match="finds no CUDA device"):
        prepare(RunSpec(model=ref("chain"), device="cuda"))


class TestTheModelGivenIsTheModelRun:
    @pytest.mark.parametrize(("net", "types"), [
        ("complex_filter", {"float32", "complex64"}), ("doubles", {"float32", "float64"}), ("half", {"bfloat16"}),
    ])  # fmt: skip
    def test_nothing_is_cast_where_nobody_asks(self, net: str, types: set[str]) -> None:
        spec = RunSpec(model=trap_nets.ref(net))
        loaded = load(spec.model)
        with preserve_global_state():
            ran = prepare(spec, loaded)
        prepared = {**dict(ran.model.named_parameters()), **dict(ran.model.named_buffers())}
        given = {**dict(loaded.model.named_parameters()), **dict(loaded.model.named_buffers())}
        assert all(torch.equal(prepared[name], tensor) for name, tensor in given.items())
        assert {str(tensor.dtype).removeprefix("torch.") for tensor in prepared.values()} == types
        assert ran.inputs.dtype == loaded.inputs.dtype

    def test_complex_numbers_stay_complex_at_the_precision_asked_for(self) -> None:
        with preserve_global_state():
            model = prepare(RunSpec(model=trap_nets.ref("complex_filter"), dtype="float64")).model
        weight = model.get_parameter("1.trap.weight")
        assert weight.dtype is torch.complex128 and bool((weight.imag == 1).all())
        assert model.get_parameter("0.weight").dtype is torch.float64

    def test_the_types_that_ran_are_named(self) -> None:
        assert types_of(load(trap_nets.ref("complex_filter")).model) == "float32, complex64"
        assert types_of(load(trap_nets.ref("half")).model) == "bfloat16"
