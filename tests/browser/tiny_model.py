"""A model that is measured in a blink: four layers with a residual each, and a factory that raises."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))

    def forward(self, x):
        return x + self.inner(x)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build():
    return Tiny(), torch.randn(512, 16)


def broken():
    raise ValueError("the factory says no")


def large():
    """The model of a card: nothing of it is allocated."""
    return Tiny(), torch.randn(65536, 16)
