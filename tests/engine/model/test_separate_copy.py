"""The model that is judged is the model that was given: hooks, closures, batches and all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from explorer.engine.bench.step import forward_backward, prepare
from explorer.engine.model.load import load
from explorer.engine.model.loaded import Loaded
from explorer.engine.model.separate_copy import is_equal_start, lost_state, separate_copy
from explorer.engine.state.global_state import preserve_global_state
from explorer.record.graph import ModelRef
from explorer.record.run import RunSpec
from tests.engine import carried_nets, trap_nets


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


def compiled(place: str, backend: str = "eager") -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    if place == "block":
        model[0] = torch.compile(model[0], backend=backend)  # type: ignore[assignment]
    elif place == "in place":
        model[0].compile(backend=backend)
    elif place == "function":
        model.scale = torch.compile(torch.relu, backend=backend)  # type: ignore[assignment]
    whole = torch.compile(model, backend=backend) if place == "whole" else model
    return whole, torch.randn(2, 4)  # type: ignore[return-value]
