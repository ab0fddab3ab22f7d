"""A model and a batch: the call, the loss, errors in sentences, names without wrappers, and a copy that is the same."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from explorer.engine.bench.step import forward_backward, prepare, run_step
from explorer.engine.model.describe import describe
from explorer.engine.model.equal_models import (
    copy_batch,
    inside,
    is_equal_start,
    lost_state,
    plain_buffers,
    plain_modules,
    plain_parameters,
    separate_copy,
)
from explorer.engine.model.load import load
from explorer.engine.model.loaded import Loaded, blaming, call, default_loss, move_to
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import BadInput, ModelFailed, ModelNotLoaded
from explorer.plan.policy.presets import preset
from explorer.record.graph import ModelRef
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.engine import carried_nets, trap_nets
from tests.engine.graphs import graph_of


class Transformed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(3, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "grad":
            return self.fc(x) * torch.func.grad(lambda y: self.fc(y).sum())(x)
        return torch.vmap(lambda y: self.fc(y) if y.sum() > 0 else y)(x)


@pytest.mark.parametrize(("kind", "words"), [("grad", "beside saved-tensor hooks"), ("vmap", "inside torch.vmap")])
def test_a_transform_that_torch_refuses_is_no_fault_of_the_batch(kind: str, words: str) -> None:
    batch = torch.ones(2, 3)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with pytest.raises(ModelFailed) as caught, blaming(ModelRef("net"), batch, "forward"), hooks:
        call(Transformed(kind), batch)
    assert words in caught.value.hint


def test_a_loss_is_one_number() -> None:
    loaded = Loaded(ModelRef(target="net.py"), nn.Linear(4, 4), torch.randn(2, 4), torch.randn(2, 4), torch.sub)
    with pytest.raises(ModelFailed, match=r"returned float32\[2, 4\], not a tensor with one number"):
        loaded.loss(loaded.output())
    with pytest.raises(ModelFailed, match="returned float, not a tensor with one number"):
        replace(loaded, loss_function=lambda output, targets: 1.0).loss(loaded.output())


def test_default_losses() -> None:
    x = torch.tensor([3.0, 4.0])
    assert default_loss(x) == 12.5
    assert default_loss({"loss": x.sum(), "logits": x}) == 7
    assert default_loss({"a": x, "ids": torch.tensor([1]), "b": [x]}) == 12.5
    losses = {"loss_box": torch.tensor(2.0), "loss_class": torch.tensor([3.0])}
    assert default_loss(losses) == 5 != default_loss({**losses, "scores": torch.tensor([3.0])})
    with pytest.raises(ModelFailed, match="nothing to take a loss of"):
        default_loss(torch.tensor([1]))


def test_a_move_changes_floats_and_leaves_whole_numbers() -> None:
    loaded = load(ModelRef(target="sample_models/tied_lm.py", arguments={"batch": 2, "n_layers": 1, "length": 4}))
    placed = move_to(loaded, "cpu", torch.float64)
    assert {p.dtype for p in placed.model.parameters()} == {torch.float64}
    assert placed.inputs.dtype == placed.targets.dtype == torch.int64
    assert placed.loss(placed.output()).dtype == torch.float64


def test_a_batch_whose_inputs_are_its_targets_has_one_copy() -> None:
    x = torch.randn(4, 8)
    loaded = Loaded(ModelRef(target="any"), nn.Linear(8, 8), x, (x, x.clone()), torch.sub)
    placed = move_to(loaded, "cpu", torch.float64)
    assert placed.inputs is placed.targets[0] is not placed.targets[1] and placed.inputs is not x
    inputs, targets = copy_batch((x, [x, x.clone()]))
    assert inputs is targets[0] is not targets[1] and inputs is not x and torch.equal(inputs, x)


class Said(nn.Module):
    def forward(self, *args: object, **kwargs: object) -> tuple[object, object]:
        return args, kwargs


@pytest.mark.parametrize(("inputs", "args", "kwargs"), [
    (1, (1,), {}),
    ((1, 2), (1, 2), {}),
    ([1, {"x": 2}], (1, {"x": 2}), {}),
    (({"x": 1},), ({"x": 1},), {}),
    ({"x": 1, "y": 2}, (), {"x": 1, "y": 2}),
    ({"*": (1, 2), "x": 3}, (1, 2), {"x": 3}),
    ({"x": 3, "*": 1}, (1,), {"x": 3}),
    ({"*": ({"x": 1},)}, ({"x": 1},), {}),
])  # fmt: skip
def test_the_forms_of_inputs(inputs: object, args: object, kwargs: object) -> None:
    assert call(Said(), inputs) == (args, kwargs)


def test_a_dict_that_was_meant_as_one_argument_is_told_how() -> None:
    ref = ModelRef(target="net.py")
    with pytest.raises(ModelFailed, match=r"gets it as \(dict,\)"), blaming(ref, {"x": torch.ones(1)}, "forward"):
        call(nn.Linear(1, 1), {"x": torch.ones(1)})
    with pytest.raises(ModelFailed) as failed, blaming(ref, torch.ones(1), "forward"):
        call(nn.Linear(2, 1), torch.ones(1))
    assert "dict" not in failed.value.hint


MADE = {
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyConv1d(2, 1)),
    "scripted": lambda: nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))),
    "old_norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
    "warmed": lambda: nn.Sequential(nn.LazyLinear(3)),
    "sparse": lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1)),
}


def build(kind: str) -> tuple[nn.Module, Tensor]:
    model, batch = MADE[kind](), torch.tensor([1, 2]) if kind == "sparse" else torch.ones(2, 4)
    if kind == "warmed":
        model(batch)
    return model, batch


def made(kind: str) -> ModelRef:
    return ModelRef(target=__file__, arguments={"kind": kind})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "words", "hint"), [
    ("lazy", r"without a shape: 0\.weight, 0\.bias, 1\.weight and 1 more", "once before the factory returns"),
    ("scripted", r"torch\.jit compiled: 1\.", r"before torch\.jit\.script"),
])  # fmt: skip
def test_models_that_cannot_be_watched_say_why_and_what_next(kind: str, words: str, hint: str) -> None:
    with pytest.raises(ModelNotLoaded, match=f"{words}.*{hint}"):
        load(made(kind))


@pytest.mark.filterwarnings("ignore")
def test_what_can_be_opened_is_opened() -> None:
    assert describe(made("warmed")).by_fqn["0"].parameter_bytes == 60
    graph = describe(made("old_norm"))
    assert graph.chain == ("0", "1") and preset("all", graph).blocks
    spec = RunSpec(model=graph.model, policy=Policy.recompute(["0"]), optimizer="adamw")
    with preserve_global_state():
        assert run_step(prepare(spec)) > 0
    with pytest.raises(ModelFailed, match=r"weight_norm keeps a computed weight in 0.*parametrizations\.weight_norm"):
        graph_of(load(graph.model).model, torch.ones(2, 4))


def test_a_sparse_gradient_needs_another_optimizer() -> None:
    spec = RunSpec(model=made("sparse"))
    with preserve_global_state():
        with pytest.raises(BadInput, match=r"gradient of 0 is sparse.*AdamW.*sgd.*sparse=False"):
            prepare(spec)
        assert run_step(prepare(msgspec.structs.replace(spec, optimizer="sgd"))) > 0
        assert run_step(prepare(msgspec.structs.replace(spec, frozen=("0",)))) > 0


def held(module: nn.Module, name: str = "module") -> nn.Module:
    """Holds a module as DistributedDataParallel does, or under another name."""
    holder = nn.Module()
    holder.add_module(name, module)
    return holder


def own() -> nn.Module:
    """Has a part called `module`, and a tensor beside it: no wrapper."""
    holder = held(nn.Linear(2, 2))
    holder.scale = nn.Parameter(torch.ones(1))
    return holder


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_wrappers_do_not_show_in_a_name() -> None:
    plain = net()
    wrapped = held(nn.Sequential(checkpoint_wrapper(plain[0]), held(plain[1], "_orig_mod")))
    for names in (plain_parameters, plain_buffers):
        assert {name: id(value) for name, value in names(wrapped).items()} == {
            name: id(value) for name, value in names(plain).items()
        }
    assert [fqn for fqn, _ in plain_modules(wrapped)] == ["", "0", "1"]


def test_a_part_called_module_is_no_wrapping() -> None:
    assert inside(held(net())) == "module" and inside(own()) == "" and inside(net()) == ""
    assert set(plain_parameters(own())) == {"scale", "module.weight", "module.bias"}
    assert set(plain_buffers(held(net()))) == {f"1.{name}" for name in net()[1]._buffers}


def test_a_shared_module_stands_under_all_its_names_and_a_circle_ends() -> None:
    model = net()
    model.again = model[0]
    assert {"0.weight", "again.weight"} <= set(plain_parameters(model))
    model[0].itself = model[0]
    assert [fqn for fqn, _ in plain_modules(model)] == ["", "0", "1", "again"]


def test_hooks_on_tensors_are_the_twin_s_too() -> None:
    """A deep copy loses them: the gradients would come unclipped."""
    spec = RunSpec(model=carried_nets.ref("clipped", right=True))
    with preserve_global_state():
        trainee = prepare(spec, load(spec.model))
        forward_backward(trainee)
    gradients = [parameter.grad for parameter in trainee.model.parameters()]
    largest = max(float(gradient.abs().max()) for gradient in gradients if gradient is not None)
    assert largest == torch.tensor(1e-4).item()


def test_a_hook_that_holds_a_module_holds_the_twin_s() -> None:
    loaded = load(carried_nets.ref("held_by_hook", right=True))
    own = separate_copy(loaded, seed=0)
    before = [tensor.clone() for tensor in loaded.model.state_dict().values()]
    own.model(own.inputs)
    assert all(map(torch.equal, before, loaded.model.state_dict().values()))
    assert not torch.equal(own.model.state_dict()["1.trap.seen"], before[0].new_zeros(()))


def test_inputs_are_copied_and_want_what_they_wanted() -> None:
    loaded = load(carried_nets.ref("input_gradient", right=True))
    own = separate_copy(loaded, seed=0)
    assert own.inputs is not loaded.inputs and own.inputs.data_ptr() != loaded.inputs.data_ptr()
    assert own.inputs.requires_grad and own.inputs.is_leaf and torch.equal(own.inputs, loaded.inputs)
    assert not own.targets.requires_grad


def test_a_factory_that_does_not_build_the_same_twice_is_copied() -> None:
    loaded = load(carried_nets.ref("another_each_time"))
    assert not is_equal_start(loaded, load(loaded.ref))
    own = separate_copy(loaded, seed=0)
    assert is_equal_start(loaded, own)


def test_a_factory_that_hands_out_one_model_is_copied() -> None:
    first = load(trap_nets.ref("plain"))
    same = Loaded(first.ref, first.model, first.inputs, first.targets, first.loss_function)
    assert not is_equal_start(first, same), "it shares its memory"


def test_modes_and_attributes_belong_to_the_start() -> None:
    loaded, other = load(trap_nets.ref("plain_counter")), load(trap_nets.ref("plain_counter"))
    assert is_equal_start(loaded, other)
    other.model[1].trap.n_forwards = 3  # type: ignore[index, union-attr]
    assert not is_equal_start(loaded, other)
    other = load(trap_nets.ref("plain_counter"))
    other.model[1].eval()  # type: ignore[index]
    assert not is_equal_start(loaded, other)


@pytest.mark.parametrize("place", ["whole", "block", "in place", "function"])
def test_a_compiled_model_is_built_the_same_twice(place: str) -> None:
    """Torch writes addresses of the model on what it compiles."""
    loaded = load(ModelRef(target=f"{__file__}:compiled", arguments={"place": place}))
    assert is_equal_start(loaded, load(loaded.ref))
    assert not lost_state(loaded.model, load(loaded.ref).model)
    assert not separate_copy(loaded, seed=0).left_behind


def compiled(place: str) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    if place == "block":
        model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment]
    elif place == "in place":
        model[0].compile(backend="eager")
    elif place == "function":
        model.scale = torch.compile(torch.relu, backend="eager")  # type: ignore[assignment]
    whole = torch.compile(model, backend="eager") if place == "whole" else model
    return whole, torch.randn(2, 4)  # type: ignore[return-value]
