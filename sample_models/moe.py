"""Mixture of experts: a router decides, with noise, which expert sees which token.

A recomputed block has to decide again, and decide the same. The router's noise comes from torch's generator, so with
`preserve_rng_state=True` it does. Switch it off and tokens go to other experts in the second forward: shapes change and
torch notices, or they happen to stay and the gradient silently belongs to experts that never made the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {
    "small": {"n_layers": 6, "width": 96, "n_experts": 4, "length": 128, "batch": 16, "vocabulary": 256},
    "gpu": {"n_layers": 12, "width": 768, "n_experts": 4, "length": 1024, "batch": 8, "vocabulary": 32000},
}


class Router(nn.Module):
    """The best expert for each token, by a noisy score in training."""

    def __init__(self, width: int, n_experts: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, n_experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        score = self.score(x)
        if self.training:
            score = score + torch.randn_like(score)
        weight, expert = score.softmax(-1).max(-1)
        return weight, expert


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class MoeBlock(nn.Module):
    def __init__(self, width: int, n_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = Router(width, n_experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(n_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weight, chosen = self.router(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, mine, expert(tokens[mine]) * weight[mine].unsqueeze(1).to(tokens.dtype))
        return x + out.view_as(x)


class MoeLM(nn.Module):
    def __init__(self, n_layers: int, width: int, n_experts: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(MoeBlock(width, n_experts) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(
    *, n_layers: int, width: int, n_experts: int, length: int, batch: int, vocabulary: int
) -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    text = torch.randint(vocabulary, (batch, length + 1))
    model = MoeLM(n_layers, width, n_experts, vocabulary)
    return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), next_token_loss
