"""A small net with one fault switched on at a time: what a change of a model's source does to its memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH, BATCH, VOCABULARY, N_BLOCKS = 16, 8, 2, 32, 3

FAULTS: dict[str, tuple[str, str]] = {
    "softmax in float32": ("results", "blocks.1"),
    "mask in float32": ("results", "blocks.1"),
    "norm in float32": ("results", "blocks.1.norm"),
    "loss in float32": ("results", ""),
    "parameters in float32": ("dtype", ""),
    "attention mask kept": ("results", "blocks.1"),
    "dropout switched on": ("results", "blocks.1.dropout"),
    "activation written out": ("forward calls", "blocks.1.act"),
    "another copy": ("results", "blocks.1"),
    "one-hot targets": ("results", ""),
    "fused attention lost": ("results", "blocks.2"),
    "checkpoint lost": ("checkpoint lost", "blocks.2.norm"),
    "checkpoint added": ("checkpoint added", "blocks.0.norm"),
    "second forward": ("forward calls", "blocks.1"),
    "wider batch": ("inputs", ""),
    "longer text": ("inputs", ""),
    "activation out of place": ("results", "blocks.1.act"),
    "residual out of place": ("results", "blocks.1"),
    "wider layer": ("parameters", "blocks.1.up"),
    "one block more": ("block added", "blocks.3"),
    "one block less": ("block removed", "blocks.2"),
    "another norm": ("block replaced", "blocks.1.norm"),
    "output remembered": ("results", "blocks.1.down"),
    "layer not frozen any more": ("results", "blocks.1.down"),
    "input saved by a function": ("results", "blocks.1.up"),
}
"""By name: the kind of move that names the fault, and the block; the empty string is the model, or the step."""


class Saves(torch.autograd.Function):
    """The identity. It keeps its input for backward if it is asked to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: bool) -> Tensor:
        ctx.save_for_backward(*([x] if keep else []))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2, None


class Block(nn.Module):
    def __init__(self, number: int, fault: str) -> None:
        super().__init__()
        here = number == 1
        self.number, self.fault = number, fault if here or number != 1 else ""
        hidden = WIDTH * (8 if here and fault == "wider layer" else 4)
        self.norm: nn.Module = nn.RMSNorm(WIDTH) if here and fault == "another norm" else nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.act = nn.ReLU(inplace=not (here and fault == "activation out of place"))
        self.dropout = nn.Dropout(0.1 if here and fault == "dropout switched on" else 0.0)
        self.down.requires_grad_(not here or fault == "layer not frozen any more")
        self.remembered: list[Tensor] = []

    def is_faulty(self, fault: str) -> bool:
        return self.number == 1 and self.fault == fault

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.number == 2 and self.fault != "fused attention lost":
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH)
        kind = torch.float32 if self.is_faulty("mask in float32") else torch.bool
        future = torch.ones(x.shape[1], x.shape[1], dtype=kind).triu(1)
        scores = scores.masked_fill(future.bool(), -torch.inf)
        if self.is_faulty("attention mask kept"):
            scores = scores * (1 - future.float()).to(scores.dtype).exp()
        if self.is_faulty("softmax in float32"):
            return scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ v
        weights = scores.softmax(-1)
        if self.is_faulty("another copy"):
            weights = weights.clone()
        return weights @ v

    def body(self, x: Tensor) -> Tensor:
        normed = self.norm.float()(x.float()).to(x.dtype) if self.is_faulty("norm in float32") else self.norm(x)
        y = self.attention(normed)
        if self.number == 2 or self.is_faulty("residual out of place"):
            y = y + x
        else:
            y += x
        hidden = Saves.apply(self.up(y), self.is_faulty("input saved by a function"))  # type: ignore[no-untyped-call]
        hidden = hidden * torch.sigmoid(hidden) if self.is_faulty("activation written out") else self.act(hidden)
        projected = self.down(hidden)
        if self.is_faulty("output remembered"):
            self.remembered[:] = [projected.detach()]
        return y + self.dropout(projected)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        n_checkpoint = {"checkpoint lost": (), "checkpoint added": (0, 2)}.get(self.fault, (2,))
        if self.number in n_checkpoint:
            return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.body(x)


class Net(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        n_blocks = N_BLOCKS + {"one block more": 1, "one block less": -1}.get(fault, 0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(number, fault) for number in range(n_blocks)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1 and self.fault == "second forward":
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def build(fault: str = "") -> Any:
    if fault not in ("", *FAULTS):
        raise ValueError(fault)
    model = Net(fault)
    if fault != "parameters in float32":
        model = model.bfloat16()
    shape = (BATCH * (2 if fault == "wider batch" else 1), LENGTH * (2 if fault == "longer text" else 1))
    ids = torch.randint(VOCABULARY, shape)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        flat = output.flatten(0, 1)
        flat = flat.float() if fault == "loss in float32" else flat
        if fault == "one-hot targets":
            return F.cross_entropy(flat, F.one_hot(targets.flatten(), VOCABULARY).to(flat.dtype))
        return F.cross_entropy(flat, targets.flatten())

    return model, (ids, ids), loss
