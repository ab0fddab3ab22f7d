"""diffusers asks the function for each of its blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.plan.export.runs import (
    assert_same,
    file_of,
    module_of,
    ran_again,
    step,
    untouched,
)


def test_diffusers_asks_the_function_for_each_block() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"), norm_num_groups=4,
    )  # fmt: skip
    chosen, other = ("down_blocks.0.resnets.0", "up_blocks.1.resnets.1"), ("conv_in",)
    module = module_of(file_of(*chosen, *other), "diffusers")

    def loss_of(model: Any) -> torch.Tensor:
        sample: torch.Tensor = model(torch.ones(1, 3, 8, 8), 3).sample
        return sample.square().mean()

    plain, before = step(model, loss_of, untouched)
    gradients, calls = step(model, loss_of, module.recompute_blocks)
    assert ran_again(before, calls, chosen) == set(chosen)
    assert_same(plain, gradients)
    assert module.never_asked() == list(other)
