"""The table of models that fit: its numbers are the published ones, and small models of its classes hold the bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from benchmarks import ten_models
from explorer.engine.bench.measure import measure, measure_without_data
from explorer.plan.card.cards import parse_card
from explorer.record.policy import Policy

transformers = pytest.importorskip("transformers")

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 512, "batch": 2, "length": 64,
}  # fmt: skip
SMALL_GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "batch": 2, "length": 64}


def small(name: str) -> dict[str, object]:
    return {**SMALL_GPT2} if name == "GPT-2 XL" else {**SMALL}


@pytest.mark.parametrize("name", ten_models.MODELS)
def test_a_configuration_has_the_published_number_of_parameters(name: str) -> None:
    published = ten_models.MODELS[name]
    config = transformers.AutoConfig.for_model(**published.config)
    with torch.device("meta"):
        model = getattr(transformers, published.config["architectures"][0])._from_config(config)  # type: ignore[index]
    assert sum(parameter.numel() for parameter in model.parameters()) == published.n_parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", ten_models.MODELS)
@pytest.mark.parametrize("method", ten_models.METHODS)
def test_a_small_model_of_the_class_holds_what_was_predicted(name: str, method: str, tmp_path: Path) -> None:
    spec = ten_models.spec_of(name, tmp_path, method, **small(name))
    predicted, measured = measure_without_data(spec), measure(spec)
    assert measured.failure is None
    bytes_measured = measured.step_peak_bytes if method != "QLoRA" else measured.peaks.tracker_peak_bytes
    assert predicted.step_peak_bytes == pytest.approx(bytes_measured, rel=1e-3)


@pytest.mark.slow
def test_a_forecast_of_the_table_is_the_play_under_its_policy(tmp_path: Path) -> None:
    card = parse_card("24GiB")
    spec = replace(ten_models.spec_of("Llama 3.1 8B", tmp_path, "LoRA", **small("Llama 3.1 8B")), card=card)
    policy = Policy.recompute(["model.layers.0", "model.layers.1"])
    step = ten_models.Steps(measure_without_data(spec)).on(card, policy)
    played = measure_without_data(replace(spec, policy=policy))
    assert step.step_peak_bytes == played.step_peak_bytes
    assert step.card is not None and played.card is not None
    assert step.card.reserved_bytes == played.card.reserved_bytes


def test_a_cell_goes_down_to_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards between the least peak and that of keeping everything take a policy; below both, nothing fits."""
    spec = ten_models.spec_of("Llama 3.1 8B", tmp_path, "full", **{**small("Llama 3.1 8B"), "length": 2048, "batch": 4})
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 128256
    monkeypatch.setattr(ten_models, "CARDS", ("850MiB", "4GiB"))
    cells = list(ten_models.cells("Llama 3.1 8B", spec))
    assert [cell.partition(",")[0] for cell in cells] == ["no", "keep all"]
