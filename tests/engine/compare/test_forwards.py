"""Where two programs part in forward, block by block; what a step outside of hooks does is left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from explorer.engine.compare.forwards import Forwards, forward_difference
from explorer.record.comparison import ForwardDiff


def parted(change: Any, *, n_calls: int = 1) -> ForwardDiff:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.0)), nn.Linear(4, 2))
    other = copy.deepcopy(one)
    change(other)
    sides = [Forwards(one), Forwards(other)]
    x = torch.randn(3, 4)
    for side, times in zip(sides, (1, n_calls)):
        with side.watching():
            for _ in range(times):
                side.model(x).sum().backward()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in (*one.modules(), *other.modules()))
    return forward_difference(*sides)


def scale(block: str) -> Any:
    return lambda model: model.get_submodule(block).weight.data.mul_(1.01)


def round_off(model: nn.Module) -> None:
    model[0].weight.data.mul_(1 + 1e-6)


@pytest.mark.parametrize(
    ("change", "block", "same"),
    [
        (lambda model: None, None, True),
        (scale("0"), "0", False),
        (scale("1.0"), "1.0", False),
        (scale("2"), "2", False),
        (round_off, None, False),
    ],
)
def test_the_innermost_block_that_parts_first_is_named(change: Any, block: str | None, same: bool) -> None:
    diff = parted(change)
    assert (diff.block, diff.same, diff.n_calls) == (block, same, (1, 1))
    assert diff.order == ("", "0", "1", "1.0", "1.1", "2")


def test_settings_and_mode_of_the_block_are_told() -> None:
    def coarse(model: nn.Module) -> None:
        model.eval()
        model[1][0].eps = 0.1

    diff = parted(coarse)
    assert diff.in_baseline == "LayerNorm((4,), eps=1e-05, elementwise_affine=True, bias=True)"
    assert diff.in_candidate == "LayerNorm((4,), eps=0.1, elementwise_affine=True, bias=True) in eval mode"


def test_calls_of_the_model_are_counted() -> None:
    assert parted(lambda model: None, n_calls=3).n_calls == (1, 3)
