"""Models of transformers from a configuration: built offline, fed what they take, refused where they do not fit."""

from __future__ import annotations

import pytest

from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.errors import ModelNotLoaded
from explorer.record.graph import INPUT, ModelRef


def test_transformers_that_is_missing_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelNotLoaded, match="pip install transformers"):
        load(ModelRef(target="hf:GPT2Config"))


def test_a_model_larger_than_memory_is_refused_before_it_is_built() -> None:
    pytest.importorskip("transformers")
    arguments = {"num_hidden_layers": 4, "hidden_size": 65536, "intermediate_size": 262144}
    with pytest.raises(ModelNotLoaded, match="GiB of parameters"):
        load(ModelRef(target="hf:LlamaConfig", arguments=arguments))


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


FED = [
    ("Wav2Vec2Config", {**SMALL, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}, "input_values"),
    ("ASTConfig", {**SMALL, "num_mel_bins": 32, "max_length": 32}, "input_values"),
    ("XLNetConfig", {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": 32}, "input_ids"),
    ("PatchTSTConfig", {"d_model": 16, "num_attention_heads": 2, "context_length": 32, "ffn_dim": 16}, "past_values"),
]


@pytest.mark.parametrize(("config", "arguments", "fed"), FED, ids=[config for config, *_ in FED])
def test_a_transformers_model_is_fed_what_it_takes(config: str, arguments: dict[str, int], fed: str) -> None:
    pytest.importorskip("transformers")
    loaded = load(ModelRef(target=f"hf:{config}", arguments=dict(arguments)))
    assert fed in loaded.inputs
    loaded.loss(loaded.output()).backward()


HF = {
    "GPT2Config": ({"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 60, "n_positions": 32}, "transformer.h.0"),
    "LlamaConfig": (
        {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "vocab_size": 60,
        },
        "model.layers.0",
    ),
    "T5Config": (
        {"num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 4, "d_kv": 8, "vocab_size": 60},
        "encoder.block.0",
    ),
    "ViTConfig": (
        {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        },
        "vit.layers.0",
    ),
    "ResNetConfig": (
        {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
        "resnet.encoder.stages.0",
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", HF)
def test_models_of_transformers_unmodified(config: str) -> None:
    transformers = pytest.importorskip("transformers")
    assert hasattr(transformers, config)
    arguments, unit = HF[config]
    described = describe(ModelRef(target=f"hf:{config}", arguments=arguments))  # type: ignore[arg-type]
    assert unit in described.chain
    assert len(described.cuts) == len(described.chain) - 1
    ends = {edge.source for edge in described.edges} | {edge.target for edge in described.edges}
    assert ends <= set(described.by_fqn) | {INPUT} | {join.id for join in described.joins}
    assert not any({"moves_buffers", "keeps_cache"} & set(b.traits) for b in described.blocks)
