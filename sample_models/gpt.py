"""GPT: the textbook case. Activations grow with depth, batch and length; parameters do not.

Every block keeps about fifteen times the bytes of its output for backward: the attention matrices (batch x heads x
length x length), the widened MLP, and the dropout masks. Recompute keeps one tensor a block, its input, and pays with
one more forward of that block. All blocks are alike, so the question is how many, and the answer surprises: the last
block's checkpoint buys nothing, because its backward starts while everything else is still held.

Dropout is the trap here. A block that runs again has to draw the same masks, or the gradient belongs to another net
than the loss did. Switch `preserve_rng_state` off and look at the gradients: the loss does not tell.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {
    "small": {"n_layers": 12, "width": 128, "n_heads": 4, "length": 128, "batch": 8, "vocabulary": 512, "dropout": 0.1},
    "gpu": {
        "n_layers": 16,
        "width": 1024,
        "n_heads": 16,
        "length": 512,
        "batch": 4,
        "vocabulary": 32000,
        "dropout": 0.1,
    },
}


class Attention(nn.Module):
    """Causal attention written out, so that its matrices are there to be seen."""

    def __init__(self, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.attention_dropout = nn.Dropout(dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.n_heads)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = self.attention_dropout(scores.masked_fill(future, -torch.inf).softmax(-1))
        return self.dropout(self.out((weights @ v).transpose(1, 2).reshape(batch, length, width)))


class Mlp(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, n_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """Token and position together: one block that turns ids into vectors."""

    def __init__(self, vocabulary: int, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dropout(self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device)))


class GPT(nn.Module):
    def __init__(
        self, *, n_layers: int, width: int, n_heads: int, length: int, vocabulary: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, length, width, dropout)
        self.blocks = nn.ModuleList(Block(width, n_heads, dropout) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(
    *, n_layers: int, width: int, n_heads: int, length: int, batch: int, vocabulary: int, dropout: float
) -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    model = GPT(n_layers=n_layers, width=width, n_heads=n_heads, length=length, vocabulary=vocabulary, dropout=dropout)
    text = torch.randint(vocabulary, (batch, length + 1))
    return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), next_token_loss
