"""What a forward inside backward draws is held against what the forward drew: equal, or other numbers, by block."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from explorer.engine.compare.rerun_draws import RerunDraws


class Own(nn.Module):
    """Recomputes by torch's own checkpoint."""

    def __init__(self, preserve: bool) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
        self.preserve = preserve

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False, preserve_rng_state=self.preserve, early_stop=False)


@pytest.mark.parametrize(("preserve", "others"), [(True, {}), (False, {"layer.1": 1})])
def test_a_mask_drawn_anew_is_told_with_its_block(preserve: bool, others: dict[str, int]) -> None:
    model = Own(preserve)
    with RerunDraws(model) as draws:
        model(torch.randn(64, 64)).sum().backward()
    assert (draws.n_drawn, dict(draws.others)) == (1, others)


def test_without_a_rerun_nothing_is_drawn_in_backward() -> None:
    model = Own(True).layer
    with RerunDraws(model) as draws:
        model(torch.randn(64, 64)).sum().backward()
    assert (draws.n_drawn, dict(draws.others)) == (0, {})
