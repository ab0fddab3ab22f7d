"""Nets that fit in a lesson, and the checkpoints that lessons try on them: torch's two, and one written out.

A net is a few blocks of sixteen numbers, with the one property that its lesson is about.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explorer.engine.state.rng import RngState
from explorer.record.policy import KEEP_ALL, Policy

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


CHECK_OFF = "non-reentrant, check off"
CHECKPOINTS: dict[str, dict[str, object]] = {
    "non-reentrant": {},
    CHECK_OFF: {"determinism_check": "none"},
    "reentrant": {"use_reentrant": True},
}
"""torch's options by the name that a row has."""
ENGINES = ("keep", "non-reentrant", "reentrant")


def engine_policy(engine: str, blocks: Sequence[str]) -> Policy:
    """KEEP_ALL for `keep`, else all of `blocks` under one of torch's checkpoints."""
    return KEEP_ALL if engine == "keep" else Policy.recompute(blocks, **CHECKPOINTS[engine])


class WrittenOutCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint, written out: an operation whose backward runs the block again and calls backward inside.

    A snapshot of the random generators, if given, is restored before the block runs again. The inner backward adds
    numbers without a graph to `.grad`.
    """

    @staticmethod
    def forward(ctx: Any, block: Callable[[Tensor], Tensor], snapshot: RngState | None, x: Tensor) -> Tensor:
        ctx.block, ctx.snapshot = block, snapshot
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> object:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        leaf = x.detach().requires_grad_()
        if ctx.snapshot is not None:
            ctx.snapshot.restore()
        with torch.enable_grad():
            output = ctx.block(leaf)
        torch.autograd.backward(output, gradient)
        return None, None, leaf.grad
