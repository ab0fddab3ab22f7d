"""Which modules a forward leaves changed, by their own buffers and plain attributes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.engine.walk_net import W, graph, having


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
