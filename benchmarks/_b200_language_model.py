"""The language model that was measured on a B200 (rows.json), written from a description of its operators.

A decoder with rotary positions, RMSNorm and SwiGLU. Nothing is fused, and every local variable lives as long as it did
there: both decide what a GPU holds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

_SHAPES = {  # d_model, d_ff, layers, heads
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (2560, 10240, 32, 32),
    "10B": (4608, 12288, 50, 36),
}


class Linear(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        std = math.sqrt(2 / (n_in + n_out))
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(n_out, n_in), std=std, a=-3 * std, b=3 * std))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, n: int, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(n, d), std=1.0, a=-3, b=3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class RMSNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * rms
        return (self.weight * x).to(dtype)


class Rope(nn.Module):
    def __init__(self, context: int, d: int) -> None:
        super().__init__()
        position = torch.arange(context)
        angle = position[:, None] * 10000.0 ** -(torch.arange(0, d, 2) / d)
        self.register_buffer("cache", torch.stack((torch.cos(angle), torch.sin(angle))), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = self.cache[:, : x.shape[-2]]
        return torch.cat((cos * even - sin * odd, sin * even + cos * odd), dim=-1)


def softmax(x: Tensor) -> Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    e = torch.exp(shifted)
    return e / torch.sum(e, dim=-1, keepdim=True)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, rope: Rope) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (Linear(d, d) for _ in range(4))
        self.rope = rope

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for t in (q, k, v))
        q = self.rope(q)
        k = self.rope(k)
        i = torch.arange(x.shape[-2], device=x.device)
        mask = (i[:, None] >= i[None, :])[None]
        out = attend(q, k, v, mask)
        out = out.transpose(-2, -3).reshape(*x.shape).contiguous()
        return self.o(out)


class FeedForward(nn.Module):
    def __init__(self, d: int, ff: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(d, ff), Linear(ff, d), Linear(d, ff)

    def forward(self, x: Tensor) -> Tensor:
        w1 = self.w1(x)
        return self.w2(w1 * torch.sigmoid(w1) * self.w3(x))


class Block(nn.Module):
    def __init__(self, d: int, ff: int, heads: int, rope: Rope) -> None:
        super().__init__()
        self.attn, self.ffn = Attention(d, heads, rope), FeedForward(d, ff)
        self.ln1, self.ln2 = RMSNorm(d), RMSNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attn(self.ln1(x))
        middle = x + attended
        fed = self.ffn(self.ln2(middle))
        return middle + fed


def run_layers(layers, x):
    for layer in layers:
        x = layer(x)
    return x


class Model(nn.Module):
    def __init__(self, size: str, seq: int, vocab: int = 10000) -> None:
        super().__init__()
        d, ff, n, heads = _SHAPES[size]
        self.embedding = Embedding(vocab, d)
        rope = Rope(seq, d // heads)
        self.layers = nn.ModuleList(Block(d, ff, heads, rope) for _ in range(n))
        self.norm = RMSNorm(d)
        self.head = Linear(d, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if not self.segments:
            for layer in self.layers[: self.reached]:
                x = layer(x)
        else:
            n = -(-len(self.layers) // self.segments)
            for i in range(0, len(self.layers), n):
                x = checkpoint(run_layers, self.layers[i : i + n], x, use_reentrant=False)
        return self.head(self.norm(x))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).to(torch.float32), targets.reshape(-1))


def build(size: str = "small", seq: int = 512, segments: int = 0, rows: int = 4, reached: int | None = None):
    """`reached`: the layers that a refused forward begins; all layers are in memory."""
    model = Model(size, seq)
    model.segments, model.reached = segments, reached
    return model, (torch.randint(0, 10000, (rows, seq)), torch.randint(0, 10000, (rows, seq))), loss
