"""Recurrent: one cell, called once a time step. The same weights, many calls, and the graph is as long as the text.

The cell is one block with many calls. Recompute it and every call keeps only its state and runs again: backpropagation
through time at the price of one more pass through time. Its gradient is the sum over all calls, and each call adds its
part when backward comes by. An engine that gathers gradients segment by segment must add them up before the optimizer
takes its one step: Adam stepping once a segment is another optimizer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {
    "small": {"length": 32, "width": 128, "expansion": 4, "batch": 128, "vocabulary": 64},
    "gpu": {"length": 256, "width": 1024, "expansion": 4, "batch": 384, "vocabulary": 1024},
}


class Cell(nn.Module):
    """A gated state update with a wide inside."""

    def __init__(self, width: int, expansion: int) -> None:
        super().__init__()
        self.up = nn.Linear(2 * width, expansion * width)
        self.gate = nn.Linear(expansion * width, width)
        self.value = nn.Linear(expansion * width, width)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        inside = F.gelu(self.up(torch.cat((x, state), -1)))
        gate = torch.sigmoid(self.gate(inside))
        return gate * state + (1 - gate) * torch.tanh(self.value(inside))


class Recurrent(nn.Module):
    def __init__(self, width: int, expansion: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.cell = Cell(width, expansion)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        state = torch.zeros_like(x[:, 0])
        states = []
        for step in range(ids.shape[1]):
            state = self.cell(x[:, step], state)
            states.append(state)
        return self.head(torch.stack(states, 1))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(
    *, length: int, width: int, expansion: int, batch: int, vocabulary: int
) -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    text = torch.randint(vocabulary, (batch, length + 1))
    model = Recurrent(width, expansion, vocabulary)
    return model, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), next_token_loss
