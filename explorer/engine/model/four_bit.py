"""Linear layers whose weights are held in four bits, in the layout of bitsandbytes 0.49: NF4, quantised twice.

    weight of n elements   n / 2 bytes; for each 64 elements a byte of scale; for each 256 scales a float32 of scale
    forward, backward      scales in float32, then the weight in bfloat16, for the product alone

Each value is made by one operator, as by their kernels. adapters.py calls it; a frozen layer needs no gradient of its
weight. Source: https://arxiv.org/abs/2305.14314
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of four bits."""
ELEMENTS, BLOCK = 64, 256
"""Elements that share a scale: of four bits, and of eight."""


@functools.cache
def codes(*, signed: bool) -> Tensor:
    """The values of the 256 bytes in ascending order: seven decades, of which the upper ones are divided finer."""
    values = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        borders = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = (borders[1:] + borders[:-1]) / 2 * 10.0 ** (decade - 6)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The packed values of `weight`, its scales in a byte each, their scales, and the mean that they are measured from.

    In a step without data the four tensors have no values either.
    """
    blocks = _in_blocks(weight.detach().reshape(-1).float(), ELEMENTS)
    scales = blocks.abs().amax(1)
    levels = _nearest(
        blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None], weight.new_tensor(NF4).float()
    )
    levels = levels.reshape(-1)[: weight.numel() + weight.numel() % 2]
    packed = (levels[::2] << 4 | levels[1::2]).unsqueeze(1)
    mean = scales.mean()
    rests = _in_blocks(scales - mean, BLOCK)
    outer = rests.abs().amax(1)
    inner = _nearest(rests / outer.clamp(min=torch.finfo(torch.float32).tiny)[:, None], codes(signed=True))
    return packed, inner.reshape(-1)[: len(scales)].clone(), outer, mean


def _in_blocks(values: Tensor, size: int) -> Tensor:
    return F.pad(values, (0, -len(values) % size)).view(-1, size)


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    table = table.to(values.device)
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2).to(torch.uint8)


@torch.library.custom_op("explorer::scales_of_8_bits", mutates_args=())
def scales_of(values: Tensor, outer: Tensor, table: Tensor) -> Tensor:
    """Scales in float32, less their mean."""
    return table[values.long()] * outer.repeat_interleave(BLOCK)[: len(values)]


@scales_of.register_fake
def _(values: Tensor, outer: Tensor, table: Tensor) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.float32)


@torch.library.custom_op("explorer::weight_of_4_bits", mutates_args=())
def weight_of(packed: Tensor, scales: Tensor, levels: Tensor, shape: list[int]) -> Tensor:
    """The weight in bfloat16."""
    numbers = torch.stack((packed.view(-1) >> 4, packed.view(-1) & 15), 1).view(-1).long()
    values = levels[numbers] * scales.repeat_interleave(ELEMENTS)[: len(numbers)]
    return values[: shape[0] * shape[1]].view(shape).bfloat16()


@weight_of.register_fake
def _(packed: Tensor, scales: Tensor, levels: Tensor, shape: list[int]) -> Tensor:
    return packed.new_empty(shape, dtype=torch.bfloat16)


class _Product(torch.autograd.Function):
    """x Wᵀ + b. Backward makes the weight again; the input is not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBit, bias: Tensor | None) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.made_weight(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient @ ctx.layer.made_weight(), None, None


class FourBit(nn.Module):
    """Mixed into the class of a Linear: its weight has four bits an element."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    shape: list[int]

    def made_weight(self) -> Tensor:
        """The weight in bfloat16, made for one product."""
        scales = scales_of(self.scale_values, self.outer_scales, self.scale_codes)
        scales += self.scale_mean
        return weight_of(self.weight, scales, self.levels, self.shape)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()
        y: Tensor = _Product.apply(x.bfloat16(), self, bias)
        return y.to(x.dtype).clone()  # as in peft, whose adapter is added to a copy


@functools.cache
def _in_four_bits(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"FourBit{kind.__name__}", (FourBit, kind), {})


def hold_in_four_bits(layer: nn.Module) -> None:
    """Replaces the weight of a Linear, or of a Conv1D of transformers, in place. The layer has to be frozen."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if not isinstance(layer, nn.Linear):
        weight = weight.T
    packed, values, outer, mean = quantised(weight)
    layer.__class__ = _in_four_bits(type(layer))  # type: ignore[assignment, arg-type]
    layer.shape = list(weight.shape)  # type: ignore[assignment]
    layer.weight = nn.Parameter(packed, requires_grad=False)
    layer.register_buffer("levels", outer.new_tensor(NF4))  # each layer has copies of both tables on a GPU
    tables = codes(signed=True).to(packed.device, copy=True)
    for name, value in zip(
        ("scale_values", "outer_scales", "scale_mean", "scale_codes"), (values, outer, mean, tables)
    ):
        layer.register_buffer(name, value)
