"""Linear layers in four bits: layout, values and product, against bitsandbytes where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from explorer.engine.bench.measure import measure, measure_without_data
from explorer.engine.model.adapters import add_adapters
from explorer.engine.model.four_bit import FourBit, hold_in_four_bits, quantised
from explorer.record.graph import Lora, ModelRef
from explorer.record.run import RunSpec

SHAPES = ((64, 128), (96, 96), (7, 10), (512, 64))


def layer_of(shape: tuple[int, int]) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], dtype=torch.bfloat16).requires_grad_(False)
    weight = layer.weight.detach().clone()
    hold_in_four_bits(layer)
    return layer, weight


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_takes_half_a_byte_and_scales(shape: tuple[int, int]) -> None:
    layer, weight = layer_of(shape)
    n_scales = -(-weight.numel() // 64)
    assert layer.weight.nbytes == -(-weight.numel() // 2) and layer.weight.dtype is torch.uint8
    assert layer.scale_values.nbytes == n_scales and layer.outer_scales.nbytes == 4 * -(-n_scales // 256)
    made = layer.made_weight()
    assert made.dtype is torch.bfloat16 and (made - weight).norm() / weight.norm() < 0.15


def test_the_product_and_the_gradient_of_its_input_are_those_of_the_made_weight() -> None:
    layer, _ = layer_of((64, 128))
    x, y = (torch.randn(5, 128, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    ours, plain = layer(x), nn.functional.linear(y, layer.made_weight(), layer.bias)
    assert torch.equal(ours, plain)
    torch.autograd.backward([ours.square().sum(), plain.square().sum()])
    assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)


def test_adapters_stand_beside_layers_in_four_bits_and_the_last_layer_stays() -> None:
    first: Any = nn.Linear(128, 128)
    model = nn.Sequential(first, nn.Linear(128, 128), nn.Linear(128, 4)).bfloat16()
    add_adapters(model, Lora(targets="0", rank=2, quantize="nf4"))
    assert [isinstance(layer, FourBit) for layer in model] == [True, True, False]
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"0.lora_a", "0.lora_b"}
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    before = model(x)
    before.sum().backward()
    assert first.lora_b.grad.abs().sum() > 0
    with torch.no_grad():
        first.lora_b += 1
    assert not torch.equal(model(x), before)


def test_a_conv1d_is_held_as_the_linear_with_its_weight_transposed() -> None:
    """As bitsandbytes does in transformers: GPT-2 has no other layers."""
    conv: Any = Conv1D(128, 64).bfloat16()  # type: ignore[no-untyped-call]
    linear: Any = nn.Linear(64, 128).bfloat16()
    linear.weight.data.copy_(conv.weight.T)
    linear.bias.data.copy_(conv.bias)
    model = nn.Sequential(nn.ModuleDict({"conv": conv, "linear": linear}), nn.Linear(128, 4))
    for _ in range(2):  # layers in four bits stay as they are
        add_adapters(model, Lora(targets="0.conv|0.linear", rank=2, quantize="nf4"))
    assert isinstance(conv, FourBit) and torch.equal(conv.weight, linear.weight)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(conv(x), linear(x)) and conv.lora_a.shape == linear.lora_a.shape


@pytest.mark.parametrize("name", ["gpt", "mlp", "vit"])
def test_a_play_holds_what_a_real_step_holds(name: str) -> None:
    ref = ModelRef(target=f"sample_models/{name}.py", size="small")
    spec = RunSpec(model=ref, dtype="bfloat16", n_repeats=0, n_probes=0, lora=Lora(targets=".*", quantize="nf4"))
    played, measured = measure_without_data(spec), measure(spec)
    assert measured.failure is None
    tracked = measured.peaks.tracker_peak_bytes
    assert played.step_peak_bytes == pytest.approx(tracked, rel=1e-3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bytes_are_those_of_bitsandbytes(shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    weight = torch.randn(shape)
    packed, values, outer, mean = quantised(weight)
    theirs, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    assert torch.equal(packed, theirs)
    nearest = (values.int() - state.absmax.int()).abs()  # on a CPU their code 0 means -1.0, on a GPU -0.99
    assert nearest.max() <= 1 and torch.equal(outer, state.state2.absmax) and values.dtype == state.absmax.dtype
    assert torch.equal(mean, state.offset)
