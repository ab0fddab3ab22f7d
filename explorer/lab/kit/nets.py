"""Nets that fit in a lesson: a few blocks of sixteen numbers, each with the one property that its lesson is about."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

B = TypeVar("B", bound=nn.Module)

WIDTH = 16
BATCH = 32


class Residual(nn.Module):
    """x + second(act(first(x))): two matmuls a block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.second = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.act(self.first(x)))


class Smooth(nn.Module):
    """Linear and tanh: something that has second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class MaskedDropout(nn.Module):
    """Dropout that remembers every mask it drew; `draw` may take its random numbers from anywhere."""

    def __init__(self, p: float, draw: Callable[[Tensor, float], Tensor] | None = None) -> None:
        super().__init__()
        self.p = p
        self.draw = draw or torch_mask
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        mask = self.draw(x.detach(), self.p)
        self.masks.append(mask.bool().cpu())
        return x * mask / (1.0 - self.p)


def torch_mask(x: Tensor, p: float) -> Tensor:
    """Ones and zeros from torch's default generator of the tensor's device."""
    return F.dropout(torch.ones_like(x), p) * (1.0 - p)


class Dropped(nn.Module):
    """Linear, GELU, dropout, residual."""

    def __init__(self, p: float, draw: Callable[[Tensor, float], Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = MaskedDropout(p, draw)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(F.gelu(self.linear(x)))


class Normed(nn.Module):
    """Linear, BatchNorm, GELU."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.linear(x)))


def chain(make: Callable[[], nn.Module], n_blocks: int, *, seed: int = 0) -> nn.Sequential:
    """`block0`, `block1`, ... from `make`, with weights that depend on `seed` alone."""
    torch.manual_seed(seed)
    return nn.Sequential(OrderedDict((f"block{i}", make()) for i in range(n_blocks)))


def blocks_of(model: nn.Sequential, kind: type[B]) -> list[B]:
    """The blocks of `model`, all of one kind."""
    return [block for block in model if isinstance(block, kind)]


def block_names(model: nn.Sequential) -> list[str]:
    return [name for name, _ in model.named_children()]


class Recurrent(nn.Module):
    """A cell for every step of a sequence: all steps share its weights."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.reads = nn.Linear(width, width)
        self.remembers = nn.Linear(width, width, bias=False)

    def cell(self, state: Tensor, token: Tensor) -> Tensor:
        """The next state, (batch, width), from the last one and one token of the sequence."""
        return torch.tanh(self.reads(token) + self.remembers(state))
