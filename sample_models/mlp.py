"""MLP: a plain chain of equal layers with dropout, one Sequential. The place to learn about segments.

A chain has n boundaries. Keep them all and every layer can be recomputed on its own; keep every k-th and k layers are
recomputed together as a segment. Fewer boundaries cost less while forward runs, but a segment that runs again holds
the activations of all its layers at once. With n equal layers whose inside is as large as their border the best k is
about the square root of n: the famous "sublinear memory" result of Chen et al. (2016, arXiv 1604.06174). Recompute the
whole chain as one segment and you have won nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {
    "small": {"n_layers": 16, "width": 128, "batch": 4096, "dropout": 0.1},
    "gpu": {"n_layers": 32, "width": 1024, "batch": 16384, "dropout": 0.1},
}


class Layer(nn.Sequential):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))


def build(*, n_layers: int, width: int, batch: int, dropout: float) -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    model = nn.Sequential(*(Layer(width, dropout) for _ in range(n_layers)), nn.Linear(width, 1))
    inputs = torch.randn(batch, width)
    return model, (inputs, inputs.mean(1, keepdim=True)), F.mse_loss
