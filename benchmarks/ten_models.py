"""Ten well-known models x full, LoRA, QLoRA x 24, 40, 80 GiB at two lengths: which fits, under which policy.

python -m benchmarks.ten_models [NAME ...] prints the rows of the table of docs/models-that-fit.md, as they are done.
Nothing runs and nothing is downloaded: each step is played without data from the numbers of the configuration, and the
card's allocator is played on its timeline. `clusters.py` compares such predictions with published peaks.

A policy is tried after the one before it is refused: keep all, recompute every layer, the planner's cheapest.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from explorer.engine.bench.measure import measure_without_data
from explorer.engine.device.without_data import without_data
from explorer.engine.model.describe import describe
from explorer.engine.state.global_state import preserve_global_state
from explorer.errors import BadInput
from explorer.plan.card.cards import LARGEST_CARD, capacity_bytes, parse_card
from explorer.plan.card.step_on_card import memory_on
from explorer.plan.planners.confirm import confirmed, within_bytes
from explorer.plan.planners.planner import Planner
from explorer.plan.predict.forecaster import Forecaster
from explorer.record.card import Card
from explorer.record.graph import Lora, ModelGraph, ModelRef
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy
from explorer.record.run import RunSpec


class Published(NamedTuple):
    """A model by the numbers of its published configuration."""

    config: dict[str, object]
    n_parameters: int
    """As published, for a check of the numbers above."""
    source: str
    layers: str = "model.layers"
    linears: str = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"


def _llama(source: str, n_parameters: int, **numbers: object) -> Published:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **numbers}
    return Published(config, n_parameters, source)


def _qwen3(source: str, n_parameters: int, **numbers: object) -> Published:
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "vocab_size": 151936}
    config |= {"num_key_value_heads": 8, "max_position_embeddings": 40960}
    return Published({**config, **numbers}, n_parameters, source)


def _numbers(width: int, inner: int, n_layers: int, n_heads: int) -> dict[str, object]:
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    return dict(zip(names, (width, inner, n_layers, n_heads)))


LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
GPT2_LINEARS = "c_attn|c_proj|c_fc"
GEMMA = {"vocab_size": 256000, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192}
MODELS = {
    "Qwen3 0.6B": _qwen3(
        "Qwen/Qwen3-0.6B", 596_049_920, **_numbers(1024, 3072, 28, 16), tie_word_embeddings=True
    ),
    "Llama 3.2 1B": _llama(
        "meta-llama/Llama-3.2-1B", 1_235_814_400, **_numbers(2048, 8192, 16, 32), **LLAMA_3, tie_word_embeddings=True
    ),
    "GPT-2 XL": Published(
        {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25,
            "vocab_size": 50257, "n_positions": 1024,
        },
        1_557_611_200, "openai-community/gpt2-xl", "transformer.h", GPT2_LINEARS,
    ),
    "Gemma 2 2B": Published(
        {
            "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **_numbers(2304, 9216, 26, 8), **GEMMA,
            "query_pre_attn_scalar": 256, "sliding_window": 4096,
        },
        2_614_341_888, "google/gemma-2-2b",
    ),
    "Llama 3.2 3B": _llama(
        "meta-llama/Llama-3.2-3B", 3_212_749_824, **_numbers(3072, 8192, 28, 24), **LLAMA_3, tie_word_embeddings=True
    ),
    "Qwen3 4B": _qwen3("Qwen/Qwen3-4B", 4_022_468_096, **_numbers(2560, 9728, 36, 32), tie_word_embeddings=True),
    "Llama 2 7B": _llama(
        "meta-llama/Llama-2-7b-hf", 6_738_415_616, **_numbers(4096, 11008, 32, 32), vocab_size=32000,
        num_key_value_heads=32, max_position_embeddings=4096,
    ),
    "Mistral 7B v0.3": Published(
        {
            "architectures": ["MistralForCausalLM"], "model_type": "mistral", **_numbers(4096, 14336, 32, 32),
            "vocab_size": 32768, "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": None,
        },
        7_248_023_552, "mistralai/Mistral-7B-v0.3",
    ),
    "Llama 3.1 8B": _llama("meta-llama/Llama-3.1-8B", 8_030_261_248, **_numbers(4096, 14336, 32, 32), **LLAMA_3),
    "Qwen3 8B": _qwen3("Qwen/Qwen3-8B", 8_190_735_360, **_numbers(4096, 12288, 36, 32), tie_word_embeddings=False),
}  # fmt: skip
METHODS = ("full", "LoRA", "QLoRA")
CARDS = ("24GiB", "40GiB", "80GiB")
LENGTHS = (1024, 4096)
RANK = 16


def spec_of(name: str, folder: Path, method: str, **arguments: object) -> RunSpec:
    """The step of a model: one text, AdamW, weights and state in bfloat16. `folder` gets its configuration."""
    published = MODELS[name]
    (folder / "config.json").write_text(json.dumps(published.config))
    lora = None
    if method != "full":
        targets = rf"(.*\.)?({published.linears})"
        lora = Lora(targets=targets, rank=RANK, quantize="nf4" if method == "QLoRA" else "none")
    model = ModelRef(target=f"hf:{folder}", arguments={"batch": 1, **arguments})
    return RunSpec(model=model, dtype="bfloat16", lora=lora, n_repeats=0)


def cells(name: str, spec: RunSpec) -> Iterator[str]:
    """A cell of the table for each of CARDS: the policy, and GiB that its step reserves on a card without end."""
    cards = [parse_card(size) for size in CARDS]
    steps = Steps(measure_without_data(replace(spec, card=cards[0]), figures_only=True))
    n_layers = sum(fqn.rpartition(".")[0] == MODELS[name].layers for fqn in steps.run.by_fqn)
    every_layer = Policy.recompute([f"{MODELS[name].layers}.{i}" for i in range(n_layers)])
    for card in cards:
        what, run = "keep all", steps.on(card, Policy())
        if not within_bytes(run, None):
            what, run = "every layer", steps.on(card, every_layer)
        if not within_bytes(run, None):
            what, run = steps.planned(card, run)
        yield f"{what}, {_reserved_bytes(run) / 2**30:.1f}"


class Steps:
    """A played step, and its forecasts under policies."""

    def __init__(self, run: Measurement) -> None:
        self.run = run
        self._forecaster = Forecaster(run, None)
        self._graph: ModelGraph | None = None

    def on(self, card: Card, policy: Policy) -> Measurement:
        """The step under a policy, with the memory of an idle card."""
        step = self._forecaster.step(policy) if policy.units else self.run
        assert step is not None
        return replace(step, spec=replace(step.spec, policy=policy, card=card), card=memory_on(card, step, others=()))

    def planned(self, card: Card, refused: Measurement) -> tuple[str, Measurement]:
        """The step under the planner's cheapest policy that fits; `refused` if no policy fits."""
        spec = self.run.spec
        if self._graph is None:
            with preserve_global_state(), without_data():
                self._graph = describe(spec.model, seed=spec.seed, conditions=spec.conditions)
        planner, most = Planner(self.run, self._graph, nested=False), capacity_bytes(card)
        if planner.fixed_bytes > most:
            return "no", refused
        try:
            tries = confirmed(planner, lambda it: it.within(most), lambda policy: self.on(card, policy)).tries
        except BadInput:
            return "no", refused
        run = tries[-1][1]
        return ("planner", run) if within_bytes(run, None) else ("no", refused)


def _reserved_bytes(run: Measurement) -> int:
    """Reserved peak of the step if its card had no end."""
    assert run.spec.card is not None
    endless = replace(run.spec.card, total_bytes=LARGEST_CARD, taken_bytes=0)
    return memory_on(endless, run, others=()).reserved_bytes


def main(names: list[str]) -> None:
    print("| model | method |", *(f"{length}, {card} |" for length in LENGTHS for card in CARDS))
    print("|---|---|" + "---|" * len(LENGTHS) * len(CARDS), flush=True)
    for name in names or MODELS:
        for method in METHODS:
            row: list[str] = []
            for length in LENGTHS:
                with tempfile.TemporaryDirectory() as folder:
                    row += cells(name, spec_of(name, Path(folder), method, length=length))
            print(f"| {name} | {method} |", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
