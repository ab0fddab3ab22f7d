"""The exported function on models of diffusers, and on one that is none: exact is what it says and does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from explorer.plan.export.formats import exported
from tests.plan.export.runs import (
    assert_same,
    file_of,
    module_of,
    ran_again,
    step,
    untouched,
)


def test_every_block_that_is_chosen_runs_again_also_those_that_diffusers_does_not_offer() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"), norm_num_groups=4,
    )  # fmt: skip
    chosen = ("down_blocks.0.resnets.0", "up_blocks.1.resnets.1", "time_embedding")
    module = module_of(file_of(*chosen), "diffusers")

    def loss_of(model: Any) -> torch.Tensor:
        sample: torch.Tensor = model(torch.ones(1, 3, 8, 8), 3).sample
        return sample.square().mean()

    plain, before = step(model, loss_of, untouched)
    gradients, calls = step(model, loss_of, module.recompute_blocks)
    assert ran_again(before, calls, chosen) == set(chosen)
    assert_same(plain, gradients)


def test_it_is_exact_on_a_model_of_another_library() -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(3)))
    file, names = file_of("1"), ("0.1", "1.1", "2.1")
    recompute = module_of(file, "diffusers").recompute_blocks
    plain, before = step(model, lambda model: model(torch.ones(2, 4)).sum(), untouched)
    gradients, calls = step(model, lambda model: model(torch.ones(2, 4)).sum(), lambda m: (recompute(m), recompute(m)))
    assert {name for name in names if calls[name] == before[name] + 1} == {"1.1"}
    assert_same(plain, gradients)
    assert exported(file, "diffusers").fit == "exact"
