"""Models as people have them: classes, instances and names of a package, and whatever a factory returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from explorer.engine.bench.measure import measure
from explorer.engine.compare.compare import compare
from explorer.engine.model.load import load
from explorer.engine.model.loaded import shapes
from explorer.errors import ModelNotLoaded
from explorer.record import ModelRef, Policy, RunSpec


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Strict", "needs width, layers, which have no default.*--set width=... --set layers=..."),
        ("tiny_nit", "no factory 'tiny_nit'. Did you mean tiny_net"),
        ("wrong_parts", "has net, inputs; its parts are model, inputs, targets, loss"),
        ("several", "returned 4 things, not a model"),
        ("Silent", "without an example batch, and none was found to guess one from"),
        ("Picky", "without an example batch, and none was found"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(package: str, name: str, words: str) -> None:
    with pytest.raises(ModelNotLoaded) as error:
        load(ModelRef(target=f"{package}:{name}"))
    error.match(words)


def test_a_configuration_file_builds_a_configured_class(package: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"sample_size": 8, "in_channels": 2}))
    ref = ModelRef(target=f"{package}:Denoiser", arguments={"config": str(path)})
    assert shapes(load(ref).inputs).startswith("float32[2, 2, 8, 8]")
    with pytest.raises(ModelNotLoaded, match="cannot be read as a configuration"):
        load(ModelRef(target=f"{package}:Denoiser", arguments={"config": "nowhere.json"}))


@pytest.mark.parametrize("name", ["step", "Denoiser", "instance"])
def test_they_are_measured_and_compared_like_any_other(package: str, name: str) -> None:
    spec = RunSpec(model=ModelRef(target=f"{package}:{name}"), n_repeats=0)
    run = measure(spec)
    assert run.failure is None and run.step_peak_bytes
    block = "conv" if name == "Denoiser" else "blocks.0"
    pair = compare(spec, RunSpec(model=spec.model, n_repeats=0, policy=Policy.recompute([block])))
    assert pair.verdict == "bitwise equal"


def test_a_step_of_ones_own_returns_its_loss(package: str) -> None:
    loaded = load(ModelRef(target=f"{package}:step"))
    loss = loaded.loss(loaded.output())
    loss.backward()
    assert loss.dim() == 0 and all(parameter.grad is not None for parameter in loaded.model.parameters())
