"""A net with a little of each trap, and what a step of it leaves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from explorer.engine.state.rng import seed_everything


class Residual(nn.Module):
    """Norm, dropout and a residual: a little of each trap."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 2 * width)
        self.dropout = nn.Dropout(0.3)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.chain = nn.Sequential(Residual(), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.chain(x)


def net(seed: int = 0) -> Net:
    seed_everything(seed)
    return Net()
