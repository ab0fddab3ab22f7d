"""Exports to transformers run the chosen layers again and no others."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from explorer.plan.export.formats import exported
from tests.plan.export.runs import assert_same, assert_these_alone_run_again, file_of, module_of, step, untouched

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
T5 = {"vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2}


def llama() -> Any:
    config = transformers.LlamaConfig(**SMALL, num_hidden_layers=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config), "model.layers.{}", 4, {}


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=2)
    return transformers.GPT2LMHeadModel(config), "transformer.h.{}", 4, {}


def t5() -> Any:
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
    return model, "decoder.block.{}", 2, {"decoder_input_ids": torch.arange(8).reshape(1, 8)}


def square_of_logits(model: nn.Module, **more: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=torch.arange(8).reshape(1, 8), **more).logits
    return logits.float().square().mean()


@pytest.mark.parametrize("make", [llama, gpt2, t5])
def test_the_chosen_layers_run_again_and_no_others(make: Any) -> None:
    model, name, n, more = make()
    layers = tuple(name.format(i) for i in range(n))
    chosen = layers[1::2]
    file, loss_of = file_of(*chosen), partial(square_of_logits, **more)
    callback = module_of(file, "huggingface").RecomputeLayers()
    apply = partial(callback.on_train_begin, None, None, None)
    assert_these_alone_run_again(model, loss_of, lambda model: apply(model=model), chosen, layers)
    form = exported(file, "huggingface")
    assert form.fit == "exact" and form.recomputed == chosen


@pytest.mark.parametrize("chosen", [("model.layers.1.mlp",), ("model.layers.0", "model.layers.2.mlp"), ("model",)])
def test_blocks_that_are_no_layers_of_transformers_run_again_too(chosen: tuple[str, ...]) -> None:
    """It says exact of them."""
    model = llama()[0]
    activations = tuple(name for name, module in model.named_modules() if name.endswith("mlp.act_fn"))
    file = file_of(*chosen)
    plain, before = step(model, square_of_logits, untouched)
    gradients, calls = step(model, square_of_logits, module_of(file, "huggingface").recompute_layers)
    again = {name for name in activations if calls[name] == before[name] + 1}
    assert again == {name for name in activations if any(name.startswith(f"{fqn}.") for fqn in chosen)}
    assert exported(file, "huggingface").fit == "exact"
    assert_same(plain, gradients)


def test_its_trainer_asks_the_callback(tmp_path: Path) -> None:
    """Also after the Trainer has set every flag itself, from its own arguments."""
    pytest.importorskip("accelerate")
    calls: dict[str, int] = {}
    model, name, n, _ = llama()
    layers = {module: name.format(i) for i, module in enumerate(model.model.layers)}
    for layer, fqn in layers.items():
        layer.mlp.register_forward_pre_hook(lambda _, given, fqn=fqn: calls.update({fqn: calls.get(fqn, 0) + 1}))
    chosen = tuple(layers.values())[1:3]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
        activation_checkpointing=True,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    callback = module_of(file_of(*chosen), "huggingface").RecomputeLayers()
    transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[callback]).train()
    assert {fqn for fqn in calls if calls[fqn] == 2} == set(chosen) and len(calls) == n


def test_the_options_are_handed_on() -> None:
    model = llama()[0]
    file = file_of("model.layers.2", preserve_rng_state=False, early_stop=False)
    module_of(file, "huggingface").recompute_layers(model)
    options = model.model.layers[2]._gradient_checkpointing_func.keywords
    assert options["preserve_rng_state"] is False and options["early_stop"] is False
    assert options["use_reentrant"] is False and exported(file, "huggingface").fit == "exact"
