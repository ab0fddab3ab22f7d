"""Models of transformers, unmodified: fed, described, recomputed as segments and predicted. One file, as the import of
the library takes seconds in each process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from explorer.engine.bench.measure import measure, measure_without_data
from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.rng import seed_everything
from explorer.errors import ModelFailed, ModelNotLoaded
from explorer.record import ModelRef, Policy, RunSpec
from explorer.record.graph import INPUT


@pytest.fixture(autouse=True)
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize(("config", "words"), [
    ("GTP2Config", "no configuration 'GTP2Config'. Did you mean"),
    ("nowhere/config.json", "no configuration nowhere"),
])  # fmt: skip
def test_a_configuration_that_there_is_none_of_says_so(config: str, words: str) -> None:
    with pytest.raises(ModelNotLoaded, match=words):
        load(ModelRef(target=f"hf:{config}"))


def test_a_model_larger_than_memory_is_refused_before_it_is_built() -> None:
    arguments = {"num_hidden_layers": 4, "hidden_size": 65536, "intermediate_size": 262144}
    with pytest.raises(ModelNotLoaded, match="GiB of parameters"):
        load(ModelRef(target="hf:LlamaConfig", arguments=arguments))


WORDS = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 64}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForSequenceClassification": {"model_type": "llama", **WORDS},
    "LlamaForCausalLM": {"model_type": "llama", **WORDS},
    "BertForTokenClassification": {"model_type": "bert", **WORDS},
    "BertForMaskedLM": {"model_type": "bert", **WORDS},
    "BertForQuestionAnswering": {"model_type": "bert", **WORDS},
    "ViTForMaskedImageModeling": {"model_type": "vit", **WORDS, "image_size": 32, "patch_size": 8, "encoder_stride": 8},
    "CLIPModel": {
        "model_type": "clip",
        "projection_dim": 16,
        "text_config": {"model_type": "clip_text_model", **WORDS},
        "vision_config": {"model_type": "clip_vision_model", **WORDS, "image_size": 32, "patch_size": 8},
    },
}
WITHOUT_LOSS: dict[str, dict[str, Any]] = {
    "BertModel": {"model_type": "bert", **WORDS},
    "T5EncoderModel": {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
}


@pytest.mark.parametrize("name", [*ARCHITECTURES, *WITHOUT_LOSS])
@pytest.mark.parametrize("prefix", ["hf:", ""])
def test_the_class_that_a_configuration_names_is_built_and_trained(name: str, prefix: str, tmp_path: Path) -> None:
    """By its own loss, where it has one; a plain path works as `hf:` does."""
    file = tmp_path / "config.json"
    settings = {**ARCHITECTURES, **WITHOUT_LOSS}[name]
    file.write_text(json.dumps({"architectures": [name], **settings}))
    loaded = load(ModelRef(target=f"{prefix}{file}"))
    assert type(loaded.model).__name__ == name
    output = loaded.output()
    assert (getattr(output, "loss", None) is not None) == (name in ARCHITECTURES)
    loaded.loss(output).backward()


def test_an_unknown_architecture_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"architectures": ["OwnForCausalLM"], "model_type": "gpt2"}))
    with pytest.raises(ModelNotLoaded, match="names the class OwnForCausalLM, which transformers .* does not have"):
        load(ModelRef(target=str(file)))


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


FED = [
    ("Wav2Vec2Config", {**SMALL, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}, "input_values"),
    ("ASTConfig", {**SMALL, "num_mel_bins": 32, "max_length": 32}, "input_values"),
    ("XLNetConfig", {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": 32}, "input_ids"),
    ("PatchTSTConfig", {"d_model": 16, "num_attention_heads": 2, "context_length": 32, "ffn_dim": 16}, "past_values"),
]


@pytest.mark.parametrize(("config", "arguments", "fed"), FED, ids=[config for config, *_ in FED])
def test_a_transformers_model_is_fed_what_it_takes(config: str, arguments: dict[str, int], fed: str) -> None:
    loaded = load(ModelRef(target=f"hf:{config}", arguments=dict(arguments)))
    assert fed in loaded.inputs
    loaded.loss(loaded.output()).backward()


HF = {
    "T5Config": (
        {"num_layers": 2, "d_model": 32, "d_ff": 64, "num_heads": 4, "d_kv": 8, "vocab_size": 60},
        "encoder.block.0",
    ),
    "ViTConfig": ({**SMALL, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8}, "vit.layers.0"),
    "ResNetConfig": (
        {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]},
        "resnet.encoder.stages.0",
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", HF)
def test_models_of_transformers_unmodified(config: str) -> None:
    arguments, unit = HF[config]
    described = describe(ModelRef(target=f"hf:{config}", arguments=arguments))  # type: ignore[arg-type]
    assert unit in described.chain
    assert len(described.cuts) == len(described.chain) - 1
    ends = {edge.source for edge in described.edges} | {edge.target for edge in described.edges}
    assert ends <= set(described.by_fqn) | {INPUT} | {join.id for join in described.joins}
    assert not any({"moves_buffers", "keeps_cache"} & set(b.traits) for b in described.blocks)


def test_routed_experts_are_predicted_in_bfloat16_and_refused_in_float32() -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "batch": 2, "length": 16}
    spec = RunSpec(model=ModelRef(target="hf:MixtralConfig", arguments=small | heads), n_repeats=0)
    with pytest.raises(ModelFailed, match="routed experts in bfloat16 alone") as refused:
        measure_without_data(spec)
    assert "--dtype bfloat16" in str(refused.value)
    half = msgspec.structs.replace(spec, dtype="bfloat16")
    predicted, real = measure_without_data(half).step_peak_bytes, measure(half).peaks.tracker_peak_bytes
    assert predicted is not None and real is not None and abs(predicted - real) <= 8


def llama(transformers: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4, vocab_size=64,
        attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.arange(24).reshape(2, 12) % 64}


def gpt2(transformers: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.GPT2Config(n_embd=32, n_layer=5, n_head=4, vocab_size=64, n_positions=16, use_cache=False)
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.arange(24).reshape(2, 12) % 64}


@pytest.mark.parametrize(("model_of", "layers"), [(llama, "model.layers"), (gpt2, "transformer.h")])
def test_layers_of_transformers_run_as_segments(
    transformers: Any, model_of: Callable[[Any], tuple[nn.Module, dict[str, Tensor]]], layers: str
) -> None:
    def step(policy: Policy, **more: Any) -> list[Tensor]:
        seed_everything(0)
        model, inputs = model_of(transformers)
        apply_policy(model.train(), policy)
        output = model(**inputs, labels=inputs["input_ids"], **more)
        output.loss.backward()
        states = [x.detach() for x in (output.hidden_states or ())]
        return [p.grad for p in model.parameters() if p.grad is not None] + states + [torch.rand(2)]

    policy = Policy.recompute([tuple(f"{layers}.{i}" for i in range(0, 3)), tuple(f"{layers}.{i}" for i in (3, 4))])
    for more in ({}, {"output_hidden_states": True}):
        pairs = list(zip(step(Policy(), **more), step(policy, **more), strict=True))
        assert pairs and all(torch.equal(a, b) for a, b in pairs)
