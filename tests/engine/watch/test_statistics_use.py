"""A norm that computes with statistics which it moves is told; one that only writes or only reads them is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from explorer.engine.watch.statistics_use import StatisticsUse
from tests.engine.graphs import graph_of


class Renorm(nn.BatchNorm1d):
    """Normalises with the running mean, and moves it: batch renormalisation."""

    def forward(self, x: Tensor) -> Tensor:
        result = x - self.running_mean
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
        return result


class Still(nn.BatchNorm1d):
    """Reads and does not move."""

    def forward(self, x: Tensor) -> Tensor:
        return x - self.running_mean


class Aside(nn.BatchNorm1d):
    """Moves them, and what it makes of them meets no value that wants a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        self.shift = self.running_mean * 2
        return super().forward(x)


@pytest.mark.parametrize(("norm", "used"), [(nn.BatchNorm1d, False), (Renorm, True), (Still, False), (Aside, False)])
def test_use_is_reading_and_moving(norm: Any, used: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), norm(3))
    graph = graph_of(model, torch.randn(4, 3))
    assert ("reads_statistics" in graph.by_fqn["1"].traits) == used


def test_without_norms_nobody_uses_any() -> None:
    use = StatisticsUse(nn.Linear(2, 2))
    use.ran(torch.ops.aten.add.Tensor, (), [], [], set())
    assert list(use.used()) == []
