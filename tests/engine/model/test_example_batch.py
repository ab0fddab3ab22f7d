"""A model that came without a batch is tried with what it says of itself, and nothing of that stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from explorer.engine.model.load import load
from explorer.engine.model.loaded import shapes
from explorer.errors import ModelNotLoaded
from explorer.record import ModelRef


@pytest.mark.parametrize(
    ("name", "arguments", "inputs"),
    [
        ("Net", {}, "float32[2, 8]"),
        ("Net", {"width": 3, "batch": 7}, "float32[7, 3]"),
        ("instance", {}, "float32[2, 4]"),
        ("wide_net", {"depth": 1}, "float32[2, 16]"),
        ("Image", {}, "float32[2, 3, 224, 224]"),
        ("Words", {"length": 9}, "int64[2, 9]"),
        ("Denoiser", {}, "float32[2, 4, 16, 16], int64[2], float32[2, 77, 6]"),
        ("Labelled", {}, "float32[2, 4, 16, 16], int64[2], float32[2, 3], int64[2]"),
        ("Beside", {}, "float32[2, 4, 16, 16], int64[2]"),
        ("bare", {}, "float32[2, 8]"),
        ("listed", {}, "float32[5, 8]"),
        ("parts", {}, "float32[5, 8]"),
        ("named", {}, "float32[5, 8]"),
        ("bundle", {}, "float32[5, 8]"),
    ],
)
def test_what_people_have_is_loaded_with_a_batch(
    package: str, name: str, arguments: dict[str, int | float | str | bool], inputs: str
) -> None:
    loaded = load(ModelRef(target=f"{package}:{name}", arguments=arguments))
    assert shapes(loaded.inputs) == inputs
    assert loaded.loss(loaded.output()).requires_grad


def test_a_batch_that_the_model_refuses_is_shown(package: str) -> None:
    with pytest.raises(ModelNotLoaded, match=r"with float32\[2, 3, 48, 48\] it raised RuntimeError"):
        load(ModelRef(target=f"{package}:Image", arguments={"side": 48}))


def test_the_guess_leaves_model_and_generators_as_they_were(package: str) -> None:
    loaded = load(ModelRef(target=f"{package}:Image"))
    after = torch.rand(1)
    again = load(ModelRef(target=f"{package}:Image"))
    assert torch.equal(after, torch.rand(1)) and torch.equal(loaded.inputs, again.inputs)
    norm = loaded.model.get_submodule("norm")
    assert isinstance(norm, nn.BatchNorm2d) and norm.training and int(norm.num_batches_tracked or 0) == 0
