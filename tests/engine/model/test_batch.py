"""Models as people have them: what a factory returns, batches that are made to fit, configurations of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from explorer.engine.compare.compare import compare
from explorer.engine.model.load import load
from explorer.engine.model.loaded import shapes
from explorer.errors import ModelNotLoaded
from explorer.record import ModelRef, Policy, RunSpec


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
        ("judged", {}, "float32[5, 8]"),
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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Strict", "needs width, layers, which have no default.*--set width=... --set layers=..."),
        ("tiny_nit", "no factory 'tiny_nit'. Did you mean tiny_net"),
        ("parts", "returned dict, not a model"),
        ("several", "returned 4 things, not a model"),
        ("Silent", "without an example batch, and none was found to guess one from"),
        ("Picky", "without an example batch, and none was found"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(package: str, name: str, words: str) -> None:
    with pytest.raises(ModelNotLoaded) as error:
        load(ModelRef(target=f"{package}:{name}"))
    error.match(words)


@pytest.mark.parametrize("name", ["listed", "judged", "step"])
def test_a_batch_of_the_factorys_own_is_no_size_to_ask_for(package: str, name: str) -> None:
    with pytest.raises(ModelNotLoaded, match="makes its own batch, and its factory takes no argument batch"):
        load(ModelRef(target=f"{package}:{name}", arguments={"batch": 4}))


def test_a_configuration_file_builds_a_configured_class(package: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"sample_size": 8, "in_channels": 2}))
    ref = ModelRef(target=f"{package}:Denoiser", arguments={"config": str(path)})
    assert shapes(load(ref).inputs).startswith("float32[2, 2, 8, 8]")
    with pytest.raises(ModelNotLoaded, match="cannot be read as a configuration"):
        load(ModelRef(target=f"{package}:Denoiser", arguments={"config": "nowhere.json"}))


def test_they_are_compared_like_any_other(package: str) -> None:
    spec = RunSpec(model=ModelRef(target=f"{package}:step"), n_repeats=0)
    pair = compare(spec, RunSpec(model=spec.model, n_repeats=0, policy=Policy.recompute(["blocks.0"])))
    assert pair.verdict == "bitwise equal" and pair.baseline.step_peak_bytes


def test_a_step_of_ones_own_returns_its_loss(package: str) -> None:
    loaded = load(ModelRef(target=f"{package}:step"))
    loss = loaded.loss(loaded.output())
    loss.backward()
    assert loss.dim() == 0 and all(parameter.grad is not None for parameter in loaded.model.parameters())


def test_transformers_that_is_missing_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelNotLoaded, match="pip install transformers"):
        load(ModelRef(target="hf:GPT2Config"))
