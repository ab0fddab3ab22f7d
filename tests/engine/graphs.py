"""The block graph of a model that a test has in hand, and a net of residual blocks for all who read one forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from explorer.engine.model.describe import describe_loaded
from explorer.engine.model.loaded import Loaded, copied
from explorer.record.graph import ModelGraph, ModelRef


def graph_of_loaded(loaded: Loaded) -> ModelGraph:
    """As `describe` sees it; copies are watched."""

    def another() -> Loaded:
        return replace(loaded, model=copied(loaded.model))

    return describe_loaded(another(), another, "cpu")


def graph_of(model: nn.Module, inputs: Any) -> ModelGraph:
    """The same from a net and its `inputs`, as loaded.call takes them."""
    return graph_of_loaded(Loaded(ModelRef(target="<in memory>"), model, inputs, None, None))


B, W = 4, 8


ROW = B * W * 4
"""Bytes of one float32[B, W]."""


def graph(model: nn.Module, inputs: object = None) -> ModelGraph:
    return graph_of(model, torch.randn(B, W) if inputs is None else inputs)


def having(described: ModelGraph, trait: str) -> list[str]:
    return [block.fqn for block in described.blocks if trait in block.traits]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(W)
        self.up = nn.Linear(W, 2 * W)
        self.down = nn.Linear(2 * W, W)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Walk(nn.Module):
    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(W, W)
        self.blocks = nn.ModuleList(Residual() for _ in range(n))
        self.unused = nn.Linear(W, W)
        self.head = nn.Linear(W, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
