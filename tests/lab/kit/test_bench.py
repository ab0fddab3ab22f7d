"""An exception is an outcome; gradients come back by name, also those that nobody asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from explorer.lab.kit.bench import LabBench, Raised, attempt, gradients_by_name, hessian_product, step_gradients


def test_an_exception_keeps_its_class_and_its_first_sentence() -> None:
    def refuse() -> None:
        raise RuntimeError(
            "Trying to backward a second time. Saved intermediate values of the graph are freed when you call "
            ".backward() or autograd.grad(), and none is left for another one.\nSpecify retain_graph."
        )

    assert attempt(refuse) == Raised("RuntimeError", "Trying to backward a second time")
    assert str(attempt(refuse)) == "RuntimeError: Trying to backward a second time"
    assert attempt(lambda: 3) == 3


def test_gradients_by_name_are_those_of_backward_and_none_where_unused() -> None:
    model, x = nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)}), torch.randn(2, 4)
    used = step_gradients(model["used"], x)
    named = gradients_by_name(model["used"](x).square().mean(), model, allow_unused=True)
    assert named["idle.weight"] is None and named["idle.bias"] is None
    assert all(torch.equal(named[f"used.{name}"], gradient) for name, gradient in used.items())
    with pytest.raises(RuntimeError, match="not have been used"):
        gradients_by_name(model["used"](x).square().mean(), model)


def test_random_numbers_are_the_same_and_move_no_generator() -> None:
    before = torch.get_rng_state()
    assert torch.equal(LabBench().normal(3, seed=5), LabBench().normal(3, seed=5))
    assert not torch.equal(LabBench().normal(3, seed=5), LabBench().normal(3, seed=6))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_of_a_cubic_it_is_six_times_the_weight_along_the_direction() -> None:
    class Cubic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.idle = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.ones(1))

    model = Cubic()
    (model.w**3).sum().backward(create_graph=True)
    product = hessian_product(model, lambda parameter: torch.tensor([1.0, -1.0]))
    model.zero_grad()  # the cycle between parameter and gradient
    assert product["w"].tolist() == [6.0, -12.0] and product.get("idle") is None
