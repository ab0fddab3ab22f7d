"""Three models of different kinds, each a moment's work, and their split for tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

VOCABULARY, WIDTH, HEAD = 130, 64, 16


class Layer(nn.Module):
    """A layer of a transformer, with as many heads as the split leaves it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        seen = (q @ k.transpose(-1, -2) / HEAD**0.5).softmax(-1) @ v
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        down: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + down


class Language(nn.Module):
    def __init__(self, n_layers: int, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        if tied:  # GPT-2's; at torch's own the loss is 8e-9, and a gradient in float32 has no right digits
            nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList(Layer() for _ in range(n_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(24, 24, 3, padding=1), nn.BatchNorm2d(24)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.blocks = nn.Sequential(*[Convolution() for _ in range(4)])
        self.up, self.down = nn.Linear(24, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.relu(self.up(self.blocks(self.stem(x)).mean((2, 3)))))
        return down


def transformer(n_layers: int = 4) -> Any:
    return Language(n_layers, tied=False), torch.randint(0, VOCABULARY, (4, 32))


def tied(n_layers: int = 4) -> Any:
    return Language(n_layers, tied=True), torch.randint(0, VOCABULARY, (4, 32))


def picture() -> Any:
    return Picture(), torch.randn(4, 3, 16, 16)


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Pairs of products: the first by columns, the second by rows."""
    prefix = "layers.*." if isinstance(getattr(model, "layers", None), nn.ModuleList) else ""
    first, second = (["q", "k", "v", "up"], ["o", "down"]) if prefix else (["up"], ["down"])
    styles = {prefix + name: ColwiseParallel() for name in first} | {
        prefix + name: RowwiseParallel() for name in second
    }
    parallelize_module(model, mesh, styles)
