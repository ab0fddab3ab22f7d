"""`hf:owner/name`: the configuration alone, from the cache of transformers; without it one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from explorer.engine.model.load import load
from explorer.record.graph import ModelRef

pytest.importorskip("transformers")
CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32,
    "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
}  # fmt: skip
LOAD = """
import sys
from explorer.engine.model.load import load
from explorer.errors import ExplorerError
from explorer.record.graph import ModelRef
try:
    loaded = load(ModelRef(target=sys.argv[1], arguments={"batch": 3, "length": 8}))
    print(type(loaded.model).__name__, sorted(loaded.inputs), tuple(loaded.inputs["input_ids"].shape))
except ExplorerError as error:
    print(error.sentence, "|", error.hint)
"""


def loaded(target: str, home: Path) -> str:
    """What loading `target` prints in a process whose cache is `home` and that may not ask the hub."""
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([sys.executable, "-c", LOAD, target], env=env, capture_output=True, text=True, check=True)
    return ran.stdout


def test_the_configuration_comes_from_the_cache_and_no_weights_do(tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--Qwen--Qwen3-8B"
    snapshot = model / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (snapshot / "model.safetensors").write_text("weights that cannot be read")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123abc")
    expected = "Qwen3ForCausalLM ['input_ids', 'labels'] (3, 8)"
    assert expected in loaded("hf:Qwen/Qwen3-8B", tmp_path)
    assert expected in loaded(f"hf:{snapshot}", tmp_path), "a local folder"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "no/such/folder", "./models/qwen"])
def test_without_a_network_one_sentence_says_what_to_download(name: str, tmp_path: Path) -> None:
    text = loaded(f"hf:{name}", tmp_path)
    assert f"The configuration of {name} is neither a folder here nor in the cache" in text
    assert f"hf download {name} config.json" in text


WORDS = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
PICTURES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}


@pytest.mark.parametrize(("config", "kind", "arguments", "labels"), [
    ("LlamaConfig", "LlamaForCausalLM", WORDS, (3, 8)),
    ("LlamaConfig", "LlamaForSequenceClassification", WORDS, (3,)),
    ("ViTConfig", "ViTForImageClassification", PICTURES, (3,)),
])  # fmt: skip
def test_another_task_is_another_class_with_its_batch(
    config: str, kind: str, arguments: dict[str, int | str], labels: tuple[int, ...]
) -> None:
    settings = {**arguments, "batch": 3, "length": 8, "architectures": f'["{kind}"]'}
    model = load(ModelRef(target=f"hf:{config}", arguments=settings))  # type: ignore[arg-type]
    assert type(model.model).__name__ == kind
    assert isinstance(model.inputs, dict) and tuple(model.inputs["labels"].shape) == labels
