"""Models in the shapes that presets have to get right, small: what is repeated, large, skipped, in place or lone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from explorer.record.graph import ModelRef

WIDTH = 16


def ref(factory: str, **arguments: Any) -> ModelRef:
    return ModelRef(target=f"{__file__}:{factory}", arguments=arguments)


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class EncoderDecoder(nn.Module):
    """Many small layers on the one side, one large decoder on the other; `drop` leaves layers out at random."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Layer() for _ in range(4))
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 4 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 5)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            if torch.rand(()) >= self.drop:
                memory = layer(memory)
        return self.head(self.decoder(x, memory))


def encoder_decoder(drop: float = 0.0) -> tuple[nn.Module, Tensor]:
    return EncoderDecoder(drop), torch.randn(3, 6, WIDTH)


def conv(n_in: int, n_out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList((conv(3, 8), conv(8, 16)))
        self.middle = nn.Sequential(conv(16, 16), conv(16, 16))
        self.up = nn.ModuleList((conv(32, 8), conv(16, 8)))
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up in self.up:
            x = up(torch.cat((nn.functional.interpolate(x, scale_factor=2.0), skips.pop()), 1))
        return self.out(x)


def unet() -> tuple[nn.Module, Tensor]:
    return UNet(), torch.randn(2, 3, 16, 16)


class Flat(nn.Module):
    """A U-Net of lone operators, in-place ReLUs among them, called by a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.relu1 = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True)
        self.conv2, self.relu2 = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)
        self.conv3, self.relu3 = nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(inplace=True)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.relu1(self.conv1(x))
        low = self.relu2(self.conv2(nn.functional.avg_pool2d(high, 2)))
        x = torch.cat((high, nn.functional.interpolate(low, scale_factor=2.0)), 1)
        return self.out(self.relu3(self.conv3(x)))


def flat() -> tuple[nn.Module, Tensor]:
    return Flat(), torch.randn(2, 3, 16, 16)


def operators() -> tuple[nn.Module, Tensor]:
    """A Sequential of single operators."""
    layers = [layer for _ in range(7) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2)), torch.randn(32, WIDTH)


class DenseLayer(nn.Module):
    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.norm, self.relu, self.linear = nn.BatchNorm1d(n_in), nn.ReLU(inplace=True), nn.Linear(n_in, WIDTH)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.linear(self.relu(self.norm(torch.cat(features, 1))))


class DenseBlock(nn.ModuleDict):
    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


def dense(n_blocks: int = 2) -> tuple[nn.Module, Tensor]:
    blocks: list[nn.Module] = []
    for _ in range(n_blocks):
        blocks.append(DenseBlock({f"layer{i}": DenseLayer(WIDTH * (1 + i)) for i in range(3)}))
        blocks.append(nn.Linear(4 * WIDTH, WIDTH))
    return nn.Sequential(*blocks), torch.randn(32, WIDTH)


class Angles(nn.Module):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return torch.linspace(0.0, 1.0, x.shape[1])[:, None].expand(-1, x.shape[2]).cos()


class Attention(nn.Module):
    """Takes its tensors by keyword, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, *, hidden: Tensor, angles: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).chunk(3, -1)
        weights = torch.softmax((query * angles) @ (key * angles).transpose(1, 2), -1)
        return self.out(weights @ value)


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention, self.behind = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(hidden=self.before(x), angles=angles)
        return x + self.dropout(self.mlp(self.behind(x)))


class Decoder(nn.Module):
    """Attention by keyword, angles without gradients, dropout that drops nothing: a Llama in small."""

    def __init__(self) -> None:
        super().__init__()
        self.angles, self.layers = Angles(), nn.ModuleList(DecoderLayer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        angles = self.angles(x)
        for layer in self.layers:
            x = layer(x, angles)
        return x


def decoder() -> tuple[nn.Module, Tensor]:
    return Decoder(), torch.randn(8, 24, WIDTH)
