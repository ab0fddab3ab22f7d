"""A step without data is the measured step, storage by storage; only what kernels take for themselves is missing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from explorer.engine.bench.measure import measure, measure_without_data
from explorer.engine.device.without_data import without_data
from explorer.engine.model.describe import describe
from explorer.errors import BadInput, ModelFailed
from explorer.record.graph import ModelRef
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy
from explorer.record.run import RunSpec

GPT = ModelRef(
    target="sample_models/gpt.py", arguments={"n_layers": 2, "width": 32, "n_heads": 2, "length": 16, "batch": 2}
)
WIDE = """
import torch
from torch import nn

def build(width, depth):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))), torch.randn(2, width)

class Picky(nn.Linear):
    def forward(self, x):
        return super().forward(x[x.mean(1) * self.bias.mean() > 0])

def picky():
    return nn.Sequential(nn.Linear(4, 4), Picky(4, 4)), torch.randn(2, 4)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "wide.py"
    path.write_text(WIDE)
    return path


def costs(run: Measurement) -> list[tuple[str, int, int, int, int]]:
    """The bytes and FLOPs of each layer that is kept. Around those, attention and checkpoint keep generator states."""
    parents = {block.fqn.rpartition(".")[0] for block in run.blocks}
    of_kept = (block for block in run.blocks if block.fqn not in parents and not block.n_recompute)
    return [
        (one.fqn, one.saved_after_forward_bytes, one.at_peak_bytes, one.forward_flops, one.backward_flops)
        for one in of_kept
    ]


def nearly(foreseen: Measurement, real: Measurement) -> bool:
    """Equal but for the few bytes of the loss and of numbers that kernels were given as tensors."""
    held, tracked = foreseen.step_peak_bytes, real.peaks.tracker_peak_bytes
    return held is not None and tracked is not None and abs(held - tracked) <= 8


@pytest.mark.parametrize("policy", [Policy(), Policy.recompute(["blocks.0"])], ids=["kept", "recomputed"])
def test_a_step_without_data_holds_what_the_tracker_sees_in_a_real_one(policy: Policy) -> None:
    spec = RunSpec(model=GPT, policy=policy, n_repeats=0)
    foreseen, real = measure_without_data(spec), measure(spec)
    assert foreseen.origin == "predicted" and foreseen.times is None and foreseen.warnings
    assert nearly(foreseen, real)
    assert (foreseen.forward_flops, foreseen.recompute_flops) == (real.forward_flops, real.recompute_flops)
    assert [block.n_recompute for block in foreseen.blocks] == [block.n_recompute for block in real.blocks]
    assert costs(foreseen) == costs(real)


def test_a_model_of_many_gibibytes_is_described_and_foreseen(file: Path) -> None:
    ref = ModelRef(target=f"{file}:build", arguments={"width": 2**14, "depth": 40})
    with without_data():
        graph = describe(ref)
    parameter_bytes = 40 * (2**28 + 2**14) * 4
    assert graph.by_fqn[""].parameter_bytes == parameter_bytes > 40 * 2**30
    run = measure_without_data(RunSpec(model=ref, optimizer="sgd"))
    assert run.step_peak_bytes is not None and run.step_peak_bytes > 2 * parameter_bytes, "gradients beside them"


def test_a_graph_without_data_is_the_graph_dropout_included() -> None:
    with without_data():
        graph = describe(GPT)
    assert graph == describe(GPT)


def test_a_type_that_is_asked_for_is_that_of_the_parameters(file: Path) -> None:
    ref = ModelRef(target=f"{file}:build", arguments={"width": 8, "depth": 2})
    run = measure_without_data(RunSpec(model=ref, dtype="bfloat16"))
    real = measure(RunSpec(model=ref, dtype="bfloat16", n_repeats=0))
    assert run.dtype == "bfloat16" and nearly(run, real)


def test_routed_experts_are_foreseen_in_bfloat16_and_refused_in_float32() -> None:
    pytest.importorskip("transformers")
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "batch": 2, "length": 16}
    spec = RunSpec(model=ModelRef(target="hf:MixtralConfig", arguments=small | heads), n_repeats=0)
    with pytest.raises(ModelFailed, match="routed experts in bfloat16 alone") as refused:
        measure_without_data(spec)
    assert "--dtype bfloat16" in str(refused.value)
    half = msgspec.structs.replace(spec, dtype="bfloat16")
    assert nearly(measure_without_data(half), measure(half))


def test_what_decides_by_its_data_is_refused_in_a_sentence(file: Path) -> None:
    with pytest.raises(ModelFailed, match="decides by values that it computes") as refused:
        measure_without_data(RunSpec(model=ModelRef(target=f"{file}:picky")))
    assert "--set" in str(refused.value)
    with pytest.raises(BadInput, match="on the CPU"):
        measure_without_data(RunSpec(model=GPT, device="cuda"))
