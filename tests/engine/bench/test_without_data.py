"""What a step without data refuses, and models that leave the world without data while they are built."""

from __future__ import annotations

from pathlib import Path

import pytest

from explorer.engine.bench.measure import measure_without_data
from explorer.errors import BadInput
from explorer.plan.predict.not_predicted import not_covered
from explorer.record import ModelRef, Policy, RunSpec, Unit

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(512, 256), nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.head = nn.Linear(256, 512, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(256))

    def forward(self, ids):
        return self.head(self.embed(ids) + self.down(torch.relu(self.up(self.embed(ids) * self.scale))))

def _step(model):
    ids = torch.randint(0, 512, (2, 16))
    return model, lambda m: m(ids).square().mean()

def plain():
    return _step(Net())

def to_empty():
    with torch.device("meta"):
        model = Net()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.1, 0.1)
        model.scale.fill_(1.0)
    return _step(model)

def to_empty_in_parts():
    with torch.device("meta"):
        model = Net()
    for part in model.children():
        part.to_empty(device="cpu")
    model.head.weight = model.embed.weight
    model.scale = torch.ones(256)
    return _step(model)

def assigned():
    with torch.device("meta"):
        model = Net()
    model.load_state_dict(Net().state_dict(), assign=True)
    model.head.weight = model.embed.weight
    return _step(model)
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return path


@pytest.mark.parametrize("factory", ["to_empty", "to_empty_in_parts", "assigned"])
def test_a_model_built_on_meta_is_played_as_one_built_plainly(nets: Path, factory: str) -> None:
    runs = [
        measure_without_data(RunSpec(model=ModelRef(target=f"{nets}:{name}"), optimizer="adamw"))
        for name in ("plain", factory)
    ]
    assert runs[0].held_peak_bytes == runs[1].held_peak_bytes
    assert runs[0].step_peak_bytes == runs[1].step_peak_bytes


@pytest.mark.parametrize(
    "policy",
    [
        Policy(units=(Unit(blocks=("up",), action="offload"),)),
        Policy(units=(Unit(blocks=("up",)), Unit(blocks=("down",), action="offload"))),
        Policy(units=(Unit(blocks=("up",)),), use_reentrant=True),
    ],
)
def test_what_the_forecast_refuses_and_no_step_without_data_shows_is_not_played(nets: Path, policy: Policy) -> None:
    assert not_covered(policy)
    with pytest.raises(BadInput, match="does not show"):
        measure_without_data(RunSpec(model=ModelRef(target=f"{nets}:plain"), policy=policy))
