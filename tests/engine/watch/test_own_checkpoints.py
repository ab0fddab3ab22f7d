"""A model that checkpoints by itself tells which of its blocks run again, in one forward and without a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from explorer.engine.watch.own_checkpoints import OwnCheckpoints


class Whole(nn.Module):
    """Its own forward in a Function of its own, as guided-diffusion's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return Through.apply(self.inner, x)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return run(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
        self.whole = Whole()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = checkpoint(self.layers[1], x, use_reentrant=False)
        x = self.layers[2](x)
        return self.whole(x)


def test_the_outermost_blocks_that_run_again_are_named() -> None:
    model = Net()
    with OwnCheckpoints(model) as own:
        model(torch.ones(1, 2))
    assert own.blocks == ("layers.1", "whole")
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_forward_that_raises_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RuntimeError), OwnCheckpoints(model) as own:
        model(torch.ones(1, 3))
    assert own.blocks == () and not model[0]._forward_hooks
