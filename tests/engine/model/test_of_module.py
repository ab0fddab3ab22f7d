"""What a module says of its block before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from explorer.engine.model.of_module import has_running_statistics, of_module


def test_bytes_are_of_all_below_and_parameters_of_its_own() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_parameter("shift", None)
            self.norm = nn.BatchNorm1d(2)

    assert of_module("blocks.0", Scaled()) == {
        "fqn": "blocks.0",
        "kind": "Scaled",
        "parameter_bytes": (3 + 2 + 2) * 4,
        "buffer_bytes": (2 + 2) * 4 + 8,
        "own_parameters": ("blocks.0.scale",),
    }
    assert of_module("", nn.Linear(2, 2))["own_parameters"] == ("weight", "bias")


@pytest.mark.parametrize(
    ("module", "moves"),
    [
        (nn.BatchNorm1d(2), True),
        (nn.InstanceNorm1d(2, track_running_stats=True), True),
        (nn.InstanceNorm1d(2), False),
        (nn.BatchNorm1d(2, track_running_stats=False), False),
        (nn.LayerNorm(2), False),
    ],
)
def test_norms_whose_forward_moves_a_mean(module: nn.Module, moves: bool) -> None:
    assert has_running_statistics(module) == moves
