"""A model's own checkpointing is off for a while, whoever's flag or call it is, and on again afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint as torchs
from torch import Tensor, nn

from explorer.engine.policy.plain import SWITCHES, checkpointing_off


class Block(nn.Module):
    """Checkpoints its layer itself, by torch's function, either way."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant, self.n_calls = nn.Linear(3, 3), reentrant, 0

    def run(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return self.layer(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return torchs.checkpoint(self.run, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_own_is_a_plain_call_with_the_same_gradients(reentrant: bool) -> None:
    model, x = Block(reentrant), torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    assert model.n_calls == 2
    expected = model.layer.weight.grad.clone()
    model.zero_grad()
    with checkpointing_off(model):
        model(x).sum().backward()
    assert model.n_calls == 3 and torch.equal(model.layer.weight.grad, expected)
    model(x).sum().backward()
    assert model.n_calls == 5


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_that_are_on_are_off_inside_alone(switch: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    setattr(model[0], switch, True)
    setattr(model[1], switch, 3)  # a number of that name is none
    with pytest.raises(ValueError), checkpointing_off(model):
        assert getattr(model[0], switch) is False and getattr(model[1], switch) == 3
        raise ValueError
    assert getattr(model[0], switch) is True and getattr(model[1], switch) == 3
