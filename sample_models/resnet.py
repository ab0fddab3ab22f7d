"""ResNet: a deep residual ConvNet with BatchNorm. The early blocks hold the memory, the late ones the parameters.

Each stage halves the picture and doubles the channels, so its activations shrink while its parameters grow. Where you
recompute therefore matters more than how much: the first half of the blocks saves most of what there is to save.

BatchNorm is the trap here. It moves its running statistics in every forward. A block that runs again moves them a
second time: gradients and loss are unchanged, and the model that you evaluate later is another one. The option
`running_stats="once"` hides the statistics while a block runs again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {
    "small": {"width": 16, "blocks_per_stage": 4, "n_stages": 3, "side": 32, "batch": 32, "n_classes": 10},
    "gpu": {"width": 64, "blocks_per_stage": 6, "n_stages": 4, "side": 128, "batch": 32, "n_classes": 1000},
}


class Stem(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(n_out)
        same = stride == 1 and n_in == n_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(n_in, n_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Head(nn.Module):
    def __init__(self, width: int, n_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


def build(
    *, width: int, blocks_per_stage: int, n_stages: int, side: int, batch: int, n_classes: int
) -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    blocks, n_in = [], width
    for stage in range(n_stages):
        for place in range(blocks_per_stage):
            n_out = width * 2**stage
            blocks.append(Residual(n_in, n_out, stride=2 if stage and place == 0 else 1))
            n_in = n_out
    model = nn.Sequential()
    model.add_module("stem", Stem(width))
    model.add_module("blocks", nn.Sequential(*blocks))
    model.add_module("head", Head(n_in, n_classes))
    return model, (torch.randn(batch, 3, side, side), torch.randint(n_classes, (batch,))), F.cross_entropy
