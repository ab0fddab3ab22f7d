"""Our adapters against those of the real peft: a step holds the same bytes. The line of `fit` makes peft's adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from explorer.engine.bench.measure import measure
from explorer.engine.compare.fit_judge import outline_of
from explorer.plan import lever_text
from explorer.plan.why.checkpointing import checkpointing_rows
from explorer.record.base import to_msgpack
from explorer.record.fit import LeverRow, PlayedStep
from explorer.record.graph import Lora, ModelRef
from explorer.record.run import RunSpec
from tests.own_loop.test_own_checkpointing import missing, recorded

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = [  # peft asks transformers for an old name, and says that it transposes; torch warns of the trap itself
    pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning"),
]  # fmt: skip

GPT = {"n_layers": 2, "width": 32, "n_heads": 2, "length": 16, "batch": 4, "vocabulary": 64, "dropout": 0.1}
VIT = {"n_layers": 2, "width": 32, "n_heads": 2, "side": 16, "batch": 4}
LLAMA = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "length": 16}
MODELS = {
    "gpt": ModelRef(target="sample_models/gpt.py", size="small", arguments=GPT),
    "vit": ModelRef(target="sample_models/vit.py", size="small", arguments=VIT),
    "llama": ModelRef(target="hf:LlamaConfig", arguments={**LLAMA, "num_key_value_heads": 2, "length": 16}),
    "gpt2": ModelRef(target="hf:GPT2Config", arguments=GPT2),
}
WRAPPED = """
import peft
from explorer.engine.model.load import load_for
from explorer.record.base import from_msgpack
from explorer.record.run import RunSpec


def parts():
    loaded = load_for(from_msgpack(bytes.fromhex("{spec}"), RunSpec))

    def loss(output, targets):
        return loaded.loss(output, targets=targets, trains=True)

    return loaded.model, (loaded.inputs, loaded.targets), loss


def ours():
    return parts()


def theirs():
    model, *batch_and_loss = parts()
    {line}
    return model, *batch_and_loss
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_step_with_peft_holds_the_bytes_of_ours(name: str, tmp_path: Path) -> None:
    plain = RunSpec(model=MODELS[name], n_repeats=0, n_probes=0)
    ours = replace(plain, lora=Lora(targets=outline_of(plain)[0].linears))
    row = LeverRow(levers=("lora",), step=PlayedStep(spec=ours, step_peak_bytes=1))
    (line,) = lever_text.script_lines(row)
    file = tmp_path / "wrapped.py"
    file.write_text(WRAPPED.format(spec=to_msgpack(plain).hex(), line=line))
    ours = replace(ours, model=ModelRef(target=f"{file}:ours"))
    theirs = replace(plain, model=ModelRef(target=f"{file}:theirs"))
    measured = [measure(spec) for spec in (ours, theirs)]
    assert measured[0].failure is measured[1].failure is None
    assert measured[0].step_peak_bytes == measured[1].step_peak_bytes
    assert measured[0].held_peak_bytes == measured[1].held_peak_bytes


def test_the_trap_of_a_frozen_embedding_is_told_and_its_cure_works() -> None:
    """Below a reentrant checkpoint, adapters of blocks whose inputs need no gradient get none."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**LLAMA, num_key_value_heads=2, use_cache=False)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, modules_to_save=["lm_head"])
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
    base, ids = model.base_model.model, torch.randint(64, (2, 8))
    base.gradient_checkpointing_enable({"use_reentrant": True})
    base.disable_input_require_grads()
    model.train()

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    (dead,) = checkpointing_rows(recorded(model, step))
    assert str(dead["that is"]).startswith("dead") and "enable_input_require_grads()" in str(dead["that is"])
    assert missing(model), "the adapters have no gradient"
    base.enable_input_require_grads()
    (cured,) = checkpointing_rows(recorded(model, step))
    assert cured["that is"] == "alive" and not missing(model)
