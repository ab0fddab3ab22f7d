"""Composer marks the chosen blocks and no others, and wraps what is marked."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest
from torch import nn

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
