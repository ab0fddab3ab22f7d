"""Small models for pipeline tests, each with one property that splitting could break. Ranks load them by file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Of(nn.Module):
    """A net of named parts; `call(net, *inputs)` is its forward."""

    def __init__(self, call: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor, **named: Any) -> Any:
        return self.call(self, *inputs, **named)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))))


class Language(nn.Module):
    """Embedding, a parameter used between blocks, dropout outside blocks, an unlisted norm; tied on request."""

    def __init__(self, width: int, n_blocks: int, length: int, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(n_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def language(width: int = 16, n_blocks: int = 4, length: int = 8, batch: int = 8, tied: bool = False) -> Any:
    ids = torch.randint(0, 50, (batch, length))
    return Language(width, n_blocks, length, tied=tied), (ids, torch.randint(0, 50, (batch, length))), cross_entropy


LANGUAGE = ("tokens", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")


def unet(batch: int = 8, width: int = 4) -> Any:
    """Skips over several stages, BatchNorm, and an operation in place on what a stage receives."""

    def call(net: Any, x: Tensor) -> Tensor:
        skip = net.down(x)
        bottom = net.bottom(net.deep(F.max_pool2d(skip, 2)))
        return net.head(net.up(torch.cat([F.interpolate(bottom, scale_factor=2.0), skip], 1)))

    net = Of(
        call,
        down=nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
        deep=nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Conv2d(width, 2 * width, 3, padding=1)),
        bottom=nn.Sequential(nn.BatchNorm2d(2 * width), nn.Dropout(0.1), nn.ReLU()),
        up=nn.Sequential(nn.Conv2d(3 * width, width, 3, padding=1), nn.ReLU()),
        head=nn.Conv2d(width, 1, 1),
    )
    return net, (torch.randn(batch, 3, 8, 8), torch.randn(batch, 1, 8, 8)), F.mse_loss


UNET = ("down", "deep", "bottom", "up", "head")


def carrying(width: int = 16, n_blocks: int = 4, length: int = 8, batch: int = 8) -> Any:
    """The first block's output goes through all others, as a block's argument and return, to the last but one."""

    def call(net: Any, x: Tensor) -> Tensor:
        first = x = net.first(x)
        for block in net.blocks:
            x, first = block(x, first)
        return net.head(net.wide(torch.cat([x, first], -1)))

    blocks = nn.ModuleList(
        Of(lambda net, x, carried: (net.inner(x), carried), inner=Block(width)) for _ in range(n_blocks)
    )
    parts = {"first": nn.Linear(width, width), "wide": nn.Linear(2 * width, width), "head": nn.Linear(width, 1)}
    return (
        Of(call, blocks=blocks, **parts),
        (torch.randn(batch, length, width), torch.randn(batch, length, 1)),
        F.mse_loss,
    )


CARRYING = ("first", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "wide", "head")


def transposed(batch: int = 4, width: int = 6) -> Any:
    """A boundary that is not contiguous, and an integer mask that every block reads."""

    def call(net: Any, x: Tensor) -> Tensor:
        keep = (x.detach() > 0).long()
        y = net.second(net.first(x).transpose(1, 2)).transpose(1, 2)
        return net.third(y) * keep

    first, third = nn.Linear(width, width), nn.Linear(width, width)
    net = Of(call, first=first, second=nn.Conv1d(width, width, 1), third=third)
    return net, (torch.randn(batch, 5, width), torch.randn(batch, 5, width)), F.mse_loss


def spectral() -> Any:
    """Each forward changes the vectors of the power iteration."""
    blocks = [nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(*blocks), (torch.randn(8, 6), torch.randn(8, 6)), F.mse_loss


TRANSPOSED = ("first", "second", "third")


class Router(nn.Module):
    """A loss term that leaves the block by an attribute."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.balance = y.square().mean()
        return y


def experts(batch: int = 4, width: int = 6) -> Any:
    def call(net: Any, x: Tensor) -> dict[str, Tensor]:
        total = x.new_zeros(())
        for router in net.routers:
            x = router(x)
            total = total + router.balance
        return {"loss": x.square().mean() + 0.01 * total}

    return Of(call, routers=nn.ModuleList(Router(width) for _ in range(3))), torch.randn(batch, width)


EXPERTS = ("routers.0", "routers.1", "routers.2")


def two(call: Callable[[Any, Tensor], Tensor]) -> Of:
    return Of(call, first=nn.Linear(4, 4), second=nn.Linear(4, 4))


def deciding() -> Any:
    """Reads a tensor's value between its blocks."""
    return two(lambda net, x: net.second(-h if (h := net.first(x)).sum() > 0 else h)), torch.randn(4, 4)


def repeating() -> Any:
    """Calls its first block again at the end."""
    return two(lambda net, x: net.first(net.second(net.first(x)))), torch.randn(8, 4)


def fixed() -> Any:
    """Its batch of 8 is written into the model."""
    return two(lambda net, x: net.second(net.first(x).view(8, 2, 2).flatten(1))), torch.randn(8, 4)


class Trouble(nn.Module):
    """A block that misbehaves in a rank's process only, never in the process that is being tested."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.how = how
        self.home = os.getpid()
        self.n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        # The first call in each process is the recorded one; in the ranks trouble begins with the schedule.
        if self.n_calls > 1 and torch.distributed.is_initialized():
            if self.how == "die":
                os._exit(1)
            if self.how == "sleep":
                time.sleep(600)
            if self.how == "raise":
                raise ValueError("a bad day")
        return self.linear(x)


def trouble(how: str) -> Any:
    return nn.Sequential(nn.Linear(4, 4), Trouble(how), nn.Linear(4, 4)), torch.randn(4, 4)


TROUBLE = ("0", "1", "2")


def chain(n_blocks: int = 6, batch: int = 8) -> Any:
    """Blocks in a Sequential inside the model: what segments are made of."""
    layers = nn.Sequential(*(Block(8) for _ in range(n_blocks)))
    net = Of(lambda net, x: net.head(net.layers(x)), layers=layers, head=nn.Linear(8, 8))
    return net, (torch.randn(batch, 8), torch.randn(batch, 8)), F.mse_loss


CHAIN = (*(f"layers.{k}" for k in range(6)), "head")


def scaling(width: int = 16, n_blocks: int = 4, batch: int = 8) -> Any:
    """A loop over a list, as in Hugging Face's models: one tuple of tensors goes to every block."""

    def call(net: Any, x: Tensor) -> Tensor:
        scales = x.mean((1, 2), keepdim=True).sigmoid(), x.std((1, 2), keepdim=True)
        x = net.first(x)
        for block in net.blocks:
            x = block(x, scales=scales)
        return net.head(x)

    def scaled(net: Any, x: Tensor, *, scales: tuple[Tensor, Tensor]) -> Tensor:
        return net.block(x * scales[0]) + scales[1]

    blocks = nn.ModuleList(Of(scaled, block=Block(width)) for _ in range(n_blocks))
    net = Of(call, first=nn.Linear(width, width), blocks=blocks, head=nn.Linear(width, 1))
    return net, (torch.randn(batch, 4, width), torch.randn(batch, 4, 1)), F.mse_loss


SCALING = ("first", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")


def quiet(batch: int = 8) -> Any:
    """Blocks that allocate nothing: work in place, nothing at all, a view."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Identity(), nn.Flatten(), nn.Linear(512, 512),
        nn.ReLU(), nn.Linear(512, 4),
    )  # fmt: skip
    return net, (torch.randn(batch, 3, 8, 8), torch.randn(batch, 4)), F.mse_loss


QUIET = tuple(map(str, range(7)))


def returning(width: int = 32, batch: int = 8) -> Any:
    """What the model returns is most of what it holds."""
    net = nn.Sequential(*(Block(width, 0.0) for _ in range(4)), nn.Linear(width, 64 * width))
    return net, (torch.randn(batch, 16, width), torch.randn(batch, 16, 64 * width)), F.mse_loss


RETURNING = tuple(map(str, range(5)))


def without_a_loss() -> Any:
    def failing(output: Tensor, targets: Tensor) -> Tensor:
        raise ValueError("no loss today")

    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(8, 4), torch.randn(8, 4)), failing


WITHOUT_A_LOSS = ("0", "1")


class Gate(nn.Module):
    def __init__(self, width: int, *, gated: bool) -> None:
        super().__init__()
        self.inner, self.gated = nn.Linear(width, width), gated

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y * y.sigmoid() if self.gated else y


def gated(batch: int = 8, width: int = 8, n_blocks: int = 5) -> Any:
    """Blocks of one make, two of which hold more than the others: what they do is no setting that anybody sees."""
    gates = nn.Sequential(*(Gate(width, gated=k in (1, 3)) for k in range(n_blocks)))
    net = Of(lambda net, x: net.blocks(net.first(x)), first=nn.Linear(width, width), blocks=gates)
    return net, (torch.randn(batch, width), torch.randn(batch, width)), F.mse_loss


GATED = ("first", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "blocks.4")
