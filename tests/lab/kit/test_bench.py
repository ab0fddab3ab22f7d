"""An exception is an outcome; gradients come back by name, also those that nobody asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from explorer.lab.kit.bench import LabBench, Raised, attempt, gradients_by_name, step_gradients


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
