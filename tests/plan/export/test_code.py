"""Exported Python files that torch alone can run: the chosen blocks run again and gradients stay bitwise the same."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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

CODE = ("huggingface", "diffusers", "lightning", "fsdp2", "torchtitan", "composer")


@pytest.mark.parametrize("target", CODE)
def test_names_are_data_whatever_they_are(target: str) -> None:
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


def test_lightning_hands_the_policy_to_torch() -> None:
    """What FSDPStrategy does with it: apply_activation_checkpointing, without reentrant autograd."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    chosen = ("layers.0", "layers.3")
    module = module_of(file_of(*chosen), "lightning")
    model = Chain()

    def apply(model: Any) -> None:
        apply_activation_checkpointing(model, auto_wrap_policy=module.activation_checkpointing_policy(model))

    plain, before = step(model, chain_loss, untouched)
    gradients, calls = step(model, chain_loss, apply)
    assert ran_again(before, calls, LAYERS) == set(chosen)
    assert_same(plain, gradients)


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


def test_composer_marks_the_chosen_and_no_others() -> None:
    module, model = module_of(file_of("layers.2"), "composer"), Chain()
    module.mark(model)
    assert [name for name, part in model.named_modules() if part._activation_checkpointing] == ["layers.2"]
    assert module.FSDP["activation_checkpointing_reentrant"] is False


def test_composer_wraps_what_is_marked() -> None:
    """By its own function for FSDP2, from its file: the package wants an older torch and is not imported."""
    composer = importlib.util.find_spec("composer")
    if composer is None or composer.origin is None:
        pytest.skip("mosaicml is not installed")
    own = runpy.run_path(str(Path(composer.origin).parent / "distributed" / "activation_checkpointing.py"))
    chosen = ("layers.1", "layers.2")
    module = module_of(file_of(*chosen), "composer")

    def apply(model: nn.Module) -> None:
        module.mark(model)
        composed = nn.Sequential(model)  # a ComposerModel holds the model as its child
        check = own["generate_composer_model_check_fn"](composed)
        own["apply_ac"](composed, module.FSDP["activation_checkpointing"], False, check)

    model = Chain()
    plain, before = step(model, chain_loss, untouched)
    gradients, calls = step(model, chain_loss, apply)
    assert ran_again(before, calls, LAYERS) == set(chosen)
    assert_same(plain, gradients)
