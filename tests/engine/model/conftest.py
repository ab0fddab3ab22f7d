"""A package as other people write theirs: what its factories return is loaded as it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

PACKAGE = '''
from dataclasses import dataclass
from typing import Any
import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Strict(Net):
    def __init__(self, width: int, layers: list):
        super().__init__(width)


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 111 * 111, 5)

    def forward(self, x):
        return self.head(self.norm(self.stem(x)).flatten(1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, ids):
        return self.head(self.table(ids))


@dataclass
class Output:
    sample: Tensor
    extras: Any


class Denoiser(nn.Module):
    """Configured as those of diffusers are."""

    def __init__(self, sample_size=16, in_channels=4, cross_attention_dim=6):
        super().__init__()
        self.config = type("Config", (), dict(
            sample_size=sample_size, in_channels=in_channels, cross_attention_dim=cross_attention_dim))()
        self.conv, self.time = nn.Conv2d(in_channels, in_channels, 1), nn.Embedding(1000, in_channels)
        self.words = nn.Linear(cross_attention_dim, in_channels)

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def forward(self, sample, timestep, encoder_hidden_states, mask=None):
        extra = self.time(timestep) + self.words(encoder_hidden_states).mean(1)
        return Output(self.conv(sample) + extra[:, :, None, None], [extra])


class Labelled(Denoiser):
    """Its defaults of None are none that it can do without."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.config.num_embeds_ada_norm, self.config.pooled_projection_dim = 5, 3
        self.label, self.pool = nn.Embedding(5, 4), nn.Linear(3, 4)

    def forward(self, sample, timestep=None, pooled_projections=None, class_labels=None):
        extra = self.time(timestep) + self.label(class_labels) + self.pool(pooled_projections)
        return self.conv(sample) + extra[:, :, None, None]


class Beside(Denoiser):
    """Its first layer takes an embedding of the time beside the sample."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.conv = nn.Conv2d(8, 4, 1)

    def forward(self, sample, timestep):
        time = self.time(timestep)[:, :, None, None].expand(-1, -1, *sample.shape[2:])
        return self.conv(torch.cat([sample, time], 1))


class Silent(nn.Module):
    def forward(self, x):
        return x


class Picky(Net):
    def forward(self, x, graph):
        return super().forward(x)


instance = Net(4)


def on_meta():
    with torch.device("meta"):
        return nn.Linear(4, 4)



def batch(width=8):
    return torch.randn(5, width)


def bare(): return Net()
def listed(): return [Net(), batch()]
def parts(): return {"model": Net(), "inputs": batch()}
def judged(): return Net(), ({"x": batch()}, batch()), nn.functional.mse_loss
def step():
    x, y = batch(), batch()
    return Net(), lambda model: nn.functional.mse_loss(model(x), y)
def several(): return [1, 2, 3, 4]
def list_models(): return ["tiny_net", "wide_net"]
def create_model(name, **arguments): return Net({"tiny_net": 4, "wide_net": 16}[name], **arguments)
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "pkg_of_models.py").write_text(PACKAGE)
    sys.path.insert(0, str(folder))
    yield "pkg_of_models"
    sys.path.remove(str(folder))
