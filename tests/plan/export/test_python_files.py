"""Exported Python files that torch alone can run, and diffusers: the chosen blocks run again, gradients stay equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from explorer.plan.export.formats import exported
from tests.plan.export.runs import (
    LAYERS,
    Chain,
    assert_same,
    chain_loss,
    file_of,
    module_of,
    ran_again,
    step,
    untouched,
)

CODE = ("huggingface", "diffusers", "lightning", "fsdp2", "torchtitan")


@pytest.mark.parametrize("target", CODE)
def test_names_of_blocks_are_data_and_never_code(target: str) -> None:
    names = ('a"""\nraise SystemExit', "@BODY@", "b\\", "c'")
    text = exported(file_of(*names), target).text
    space: dict[str, Any] = {}
    decision = text[text.index("BLOCKS = (") : text.index("def chosen")]
    exec(decision, space)
    assert space["BLOCKS"] == names
    compile(text, target, "exec")


def test_a_model_without_the_blocks_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"Chain has no block layers\.7: export the policy for this very model"):
        module_of(file_of("layers.7"), "lightning").chosen(Chain())


@pytest.mark.parametrize("options", [{}, {"use_reentrant": True}, {"early_stop": False}])
def test_fsdp2_recomputes_before_it_shards(options: dict[str, bool]) -> None:
    chosen = ("layers.1", "layers.4")
    module = module_of(file_of(*chosen, **options), "fsdp2")
    model = Chain()
    plain, before = step(model, chain_loss, untouched)
    gradients, calls = step(model, chain_loss, module.recompute)
    assert ran_again(before, calls, LAYERS) == set(chosen)
    assert_same(plain, gradients)
    sharded: list[tuple[str, bool]] = []
    module.fully_shard = lambda module, **sharding: sharded.append((type(module).__name__, sharding["wide"]))
    module.recompute_then_shard(model, wide=True)
    assert sharded == [("CheckpointWrapper", True)] * 2 + [("Chain", True)]


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
