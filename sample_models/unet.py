"""U-Net: skips that live long. What goes down on the left is needed again on the right, last in, first out.

The tensors at the top of the U are the largest and wait longest. Recomputing a block frees what is inside it, never the
skip that another block still needs: so the saving is smaller than what the block keeps promises. A pipeline cut through
the middle has to carry every open skip along, which is why the best cut is not in the middle.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {
    "small": {"width": 16, "depth": 3, "side": 64, "batch": 8},
    "gpu": {"width": 64, "depth": 4, "side": 256, "batch": 12},
}


class DoubleConv(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, n_out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(x)))


class Down(nn.Module):
    """Keeps the picture for its partner on the way up, and hands on a smaller one."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.block = DoubleConv(n_in, n_out)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        x = self.block(x)
        return F.max_pool2d(x, 2), *skips, x


class Up(nn.Module):
    """Takes the newest skip."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(n_in, n_out, 2, stride=2)
        self.block = DoubleConv(2 * n_out, n_out)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        return self.block(torch.cat((self.grow(x), skips[-1]), 1)), *skips[:-1]


class UNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(Down(n_in, n_out) for n_in, n_out in zip([3, *widths], widths[:-1], strict=False))
        self.middle = DoubleConv(widths[-2], widths[-1])
        self.up = nn.ModuleList(Up(n_in, n_out) for n_in, n_out in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: tuple[Tensor, ...] = ()
        for down in self.down:
            x, *rest = down(x, *skips)
            skips = tuple(rest)
        x = self.middle(x)
        for up in self.up:
            x, *rest = up(x, *skips)
            skips = tuple(rest)
        return self.head(x)


def build(*, width: int, depth: int, side: int, batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    clean = torch.randn(batch, 3, side, side)
    return UNet(width, depth), (clean + 0.1 * torch.randn_like(clean), clean), F.mse_loss
