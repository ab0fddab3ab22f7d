"""A loss function with weights: they lie in memory with the model's, and go where the model goes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from explorer.engine.bench.measure import measure, measure_without_data
from explorer.engine.model.load import load
from explorer.engine.model.loaded import move_to
from explorer.plan.memory.ledger import ledger
from explorer.record.allocations import Role
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.run import RunSpec

LOSSES = """
import torch
from functools import partial
from torch import nn

class Compared(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 512), nn.BatchNorm1d(512), nn.ReLU()).requires_grad_(False)

    def forward(self, out, targets, scale=1.0):
        return scale * (self.features(out) - self.features(targets)).square().mean()

class Scaled(nn.Module):
    def forward(self, compared, out, targets):
        return compared(out, targets)

def features():
    return nn.Linear(16, 8), (torch.randn(4, 16), torch.randn(4, 8)), Compared()

def in_a_partial():
    return nn.Linear(16, 8), (torch.randn(4, 16), torch.randn(4, 8)), partial(Scaled(), Compared())

def closed_over():
    compared = Compared()
    return nn.Linear(16, 8), (torch.randn(4, 16), torch.randn(4, 8)), lambda out, targets: compared(out, targets)

class Judge:
    def __init__(self):
        self.compared = Compared()

    def loss(self, out, targets):
        return self.compared(out, targets)

def bound():
    return nn.Linear(16, 8), (torch.randn(4, 16), torch.randn(4, 8)), Judge().loss

def own_step():
    compared, batch = Compared(), (torch.randn(4, 16), torch.randn(4, 8))
    return nn.Linear(16, 8), lambda model: compared(model(batch[0]), batch[1])

def of_classes():
    return nn.Linear(16, 8), (torch.randn(4, 16), torch.arange(4)), nn.CrossEntropyLoss(weight=torch.ones(8))

def none():
    return nn.Linear(16, 8), (torch.randn(4, 16), torch.arange(4)), nn.CrossEntropyLoss()
"""
FEATURES: dict[Role, int] = {"parameter": 4 * (8 * 512 + 3 * 512), "buffer": 4 * 2 * 512 + 8}
HELD: dict[str, dict[Role, int]] = {
    **dict.fromkeys(("features", "in_a_partial", "closed_over", "bound", "own_step"), FEATURES),
    "of_classes": {"parameter": 0, "buffer": 4 * 8},
}
"""Bytes of the loss function's weights by role."""


@pytest.fixture
def losses(tmp_path: Path) -> Path:
    (tmp_path / "losses.py").write_text(LOSSES)
    return tmp_path / "losses.py"


def at_the_start(run: Measurement, role: Role) -> int:
    assert run.allocations is not None
    return ledger(run, 0).by_role[role]


@pytest.mark.parametrize("play", [measure, measure_without_data])
@pytest.mark.parametrize("factory", HELD)
def test_the_weights_of_a_loss_are_in_the_peak(factory: str, play: object, losses: Path) -> None:
    spec = RunSpec(model=ModelRef(target=f"{losses}:{factory}"), n_repeats=0)
    run, plain = (play(replace(spec, model=ModelRef(target=f"{losses}:{name}"))) for name in (factory, "none"))  # type: ignore[operator]
    for role, n_bytes in HELD[factory].items():
        assert at_the_start(run, role) - at_the_start(plain, role) == n_bytes


@pytest.mark.parametrize("factory", sorted(HELD.keys() - {"own_step"}))
def test_a_loss_goes_where_its_model_goes(factory: str, losses: Path) -> None:
    loaded = load(ModelRef(target=f"{losses}:{factory}"), seed=0)
    moved = move_to(loaded, "meta", torch.float64)
    loss = moved.loss(moved.output())  # raises where tensors of two devices or types meet
    assert (loss.device.type, loss.dtype) == ("meta", torch.float64)
