"""A small language model and its training step, written plainly: what bugs are made in and what is rewritten."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, WORDS, LENGTH, BATCH = 16, 2, 23, 6, 8

Step = Callable[[nn.Module, Any], Any]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads(self, x: Tensor) -> Iterator[Tensor]:
        for part in (self.q, self.k, self.v):
            yield part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])

    def mask(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = self.scores(q, k).masked_fill(self.mask(x.shape[1]), -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x))))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.between, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Decoder(nn.Module):
    """Words to words: embedding and head are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def hidden(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.hidden(words))


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def text() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


def loss_of(model: nn.Module, words: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), **options)


def backward(model: nn.Module, batch: Any) -> Tensor:
    """Forward and backward, no optimizer."""
    model.zero_grad()
    loss = loss_of(model, *batch)
    loss.backward()
    return loss


def accumulated(model: nn.Module, batch: Any) -> None:
    """The same gradients from two microbatches."""
    model.zero_grad()
    for words, targets in zip(*(part.chunk(2) for part in batch)):
        (loss_of(model, words, targets) / 2).backward()


def clipped(model: nn.Module, batch: Any) -> None:
    """Accumulated, then clipped as one."""
    accumulated(model, batch)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def adamw(model: nn.Module, batch: Any, **options: Any) -> None:
    """A whole step. The optimizer lives for one step: what it remembers is no matter here."""
    backward(model, batch)
    torch.optim.AdamW(model.parameters(), lr=1e-2, **options).step()


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )  # fmt: skip


def pictures() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 2, 6, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)


def squares(model: nn.Module, batch: Any) -> Tensor:
    model.zero_grad()
    loss = F.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    return loss


@dataclass(frozen=True)
class Case:
    """A program and its rewriting, both over the parameters of `model()`."""

    candidate: Step
    reference: Step = backward
    model: Callable[[], nn.Module] = decoder
    rewritten: Callable[[nn.Module], nn.Module] | None = None
    """Makes the candidate's model of a copy of the reference's."""
    batch: Callable[[], Any] = text
    first: tuple[str, ...] = ()
    """Beginnings of the names of the tensors one of which a bug has to show first; empty: it is in all of them."""

    def models(self) -> tuple[nn.Module, nn.Module | None]:
        model = self.model()
        return model, self.rewritten(copy.deepcopy(model)) if self.rewritten else None


def swapped(kinds: dict[str, type[nn.Module]]) -> Callable[[nn.Module], nn.Module]:
    """Other classes for the modules at some paths, with the same parameters."""

    def swap(model: nn.Module) -> nn.Module:
        for path, kind in kinds.items():
            model.get_submodule(path).__class__ = kind
        return model

    return swap
