"""Changes that a forward leaves in arguments, buffers and attributes, and ways of calling a block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.engine.walk_net import W, Walk, graph, having


def test_a_block_that_writes_into_its_input() -> None:
    inner = nn.Sequential(nn.Linear(W, W), nn.ReLU(inplace=True))
    assert having(graph(nn.Sequential(inner, nn.Linear(W, W))), "changes_inputs") == ["0.1"]


class Speaks(nn.Module):
    """Takes its tensor by name and answers in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, *, hidden: Tensor, cache: object = None) -> dict[str, Tensor]:
        return {"hidden": self.linear(hidden)}


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.speaks = Speaks()

    def forward(self, x: Tensor) -> Tensor:
        return self.speaks(hidden=x * 1.0, cache=[])["hidden"]


def test_ways_of_calling_that_checkpointing_cares_for() -> None:
    described = graph(Asks())
    assert having(described, "keyword_inputs") == having(described, "nested_outputs") == ["speaks"]
    assert having(described, "keeps_cache") == []  # handed one, and leaves it alone
    assert having(graph(Walk(1)), "inputs_need_no_grad") == ["", "stem"]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)
        self.register_buffer("mean", torch.zeros(W))
        self.n_calls = 0
        self.width = W

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))  # type: ignore[operator]
        return self.linear(x) - self.mean


def test_state_that_forward_moves() -> None:
    described = graph(
        nn.Sequential(nn.BatchNorm1d(W), nn.Sequential(Counts()), nn.BatchNorm1d(W, track_running_stats=False))
    )
    assert having(described, "running_statistics") == ["", "0"]
    assert having(described, "moves_buffers") == having(described, "moves_attributes") == ["", "1", "1.0"]
