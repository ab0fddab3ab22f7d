"""Moments in eight bits and weights in four hold the bytes of bitsandbytes itself, on a card."""

from __future__ import annotations

import importlib.util

import pytest

from explorer.plan.card.cards import parse_card
from tests.engine.imaginary.test_run import has_cuda_build, values_on

HELD = """
import warnings
warnings.simplefilter("ignore")
import bitsandbytes
from torch import nn
from explorer.engine.bench.adamw_8bit import AdamW8bit
from explorer.engine.model.four_bit import hold_in_four_bits

def model():
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1000)).cuda()

def requested():
    return torch.cuda.memory_stats()["requested_bytes.all.current"]

def held_by_a_step(optimizer):
    net = model()
    stepped = optimizer(net.parameters(), lr=1e-3)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = requested()
    stepped.step()
    return requested() - before

def held_by_a_layer(hold):
    before, layer = requested(), nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
    layer = hold(layer)
    return requested() - before

def ours(layer):
    layer = layer.cuda()
    hold_in_four_bits(layer)
    return layer

def theirs(layer):
    held = bitsandbytes.nn.Linear4bit(4096, 4096, bias=False, quant_type="nf4", compress_statistics=True)
    held.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
    return held.cuda()

held_by_a_step(AdamW8bit), held_by_a_step(bitsandbytes.optim.AdamW8bit)  # tables that all steps share
out["moments"] = [held_by_a_step(AdamW8bit), held_by_a_step(bitsandbytes.optim.AdamW8bit)]
held_by_a_layer(ours), held_by_a_layer(theirs)
out["weights"] = [held_by_a_layer(ours), held_by_a_layer(theirs)]
"""


@has_cuda_build
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_moments_and_weights_hold_the_bytes_of_bitsandbytes() -> None:
    seen = values_on(parse_card("h100"), HELD, PYTHONWARNINGS="ignore")
    for held in ("moments", "weights"):
        ours, theirs = seen[held]  # type: ignore[misc]
        assert ours == theirs > 0, held


STEPPED = """
from msgspec.structs import replace
from explorer.engine.bench.measure import measure
from explorer.record import ModelRef, RunSpec
from explorer.record.graph import Lora
spec = RunSpec(model=ModelRef(target="sample_models/gpt.py"), device="cuda", dtype="bfloat16", n_repeats=0)
for quantize in ("none", "nf4"):
    run = measure(replace(spec, lora=Lora(targets=".*", quantize=quantize), optimizer="adamw8bit"))
    out[quantize] = [run.failure and run.failure.sentence, run.step_peak_bytes]
"""


@has_cuda_build
def test_a_step_with_adapters_and_four_bits_runs_on_a_card() -> None:
    seen = values_on(parse_card("h100"), STEPPED)
    assert [failure for failure, _ in seen.values()] == [None, None]  # type: ignore[misc, has-type]
