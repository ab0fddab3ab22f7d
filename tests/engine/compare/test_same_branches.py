"""A ReLU or a maximum that float64 decides otherwise is decided as the baseline did; what else differs stays apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from explorer.engine.bench.step import prepare
from explorer.engine.compare.outcome import Outcome, take
from explorer.engine.compare.reference import reference
from explorer.engine.compare.same_branches import Branches, SameBranches
from explorer.engine.model.load import load_for
from explorer.engine.state.global_state import preserve_global_state
from explorer.record.run import RunSpec
from tests.engine.tiny_nets import ref


def referred(factory: str) -> tuple[Outcome | None, str]:
    spec = RunSpec(model=ref(factory), optimizer="none")
    loaded = load_for(spec)
    with preserve_global_state():
        return reference(spec, loaded, take(prepare(spec, loaded)))


def test_decisions_within_rounding_of_zero_leave_a_reference() -> None:
    exact, because = referred("borderline")
    assert exact is not None and because == ""


def test_what_amplifies_rounding_has_none_and_no_generator_is_blamed() -> None:
    exact, because = referred("amplifying")
    assert exact is None
    assert "no generator moved" in because and "amplifies rounding" in because


def decided(x: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor]:
    """A result and its gradient by `x`."""
    x = x.clone().requires_grad_()
    passed = (x * 1).relu_() if in_place else x.relu()
    y = F.max_pool2d(passed, 2)
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("in_place", [False, True])
def test_another_input_is_decided_as_the_first_was(in_place: bool) -> None:
    first = torch.tensor([[[[1.0, 0.0], [-1.0, 1.0 - 1e-7]]]])
    other = torch.tensor([[[[1.0 - 1e-7, 1e-9], [-1.0, 1.0]]]])
    with Branches() as branches:
        y, gradient = decided(first, in_place=in_place)
    assert gradient.flatten().tolist() == [1.0, 0.0, 0.0, 0.0]
    assert decided(other, in_place=in_place)[1].flatten().tolist() == [0.0, 0.0, 0.0, 1.0]
    with SameBranches(branches.decisions):
        alike, same_gradient = decided(other, in_place=in_place)
    assert torch.equal(same_gradient, gradient) and torch.allclose(alike, y, atol=1e-6)
    with pytest.raises(IndexError), SameBranches(branches.decisions):
        decided(other, in_place=in_place)
