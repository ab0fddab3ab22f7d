"""Tied language model: one matrix is both the first block and the last.

The embedding turns ids into vectors and, transposed, vectors into scores. Its gradient has two parts, made at the two
ends of backward, and they have to be added before the optimizer steps. Inside one process autograd does that. Split the
model into pipeline stages and each end holds its own half: whoever forgets to add them trains two matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {
    "small": {"n_layers": 8, "width": 128, "length": 128, "batch": 8, "vocabulary": 1024},
    "gpu": {"n_layers": 24, "width": 1024, "length": 1024, "batch": 4, "vocabulary": 32000},
}


class Mixer(nn.Module):
    """Causal averaging over positions, then an MLP: attention's skeleton."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n_seen = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype).view(1, -1, 1)
        past = self.norm1(x).cumsum(1) / n_seen
        x = x + torch.tanh(self.mix(past)) * past
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TiedHead(nn.Module):
    """Scores from the embedding's own matrix."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class TiedLM(nn.Module):
    def __init__(self, n_layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Mixer(width) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = TiedHead(self.embedding.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(
    *, n_layers: int, width: int, length: int, batch: int, vocabulary: int
) -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    text = torch.randint(vocabulary, (batch, length + 1))
    model = TiedLM(n_layers, width, vocabulary)
    return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), next_token_loss
