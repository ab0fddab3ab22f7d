"""Models in the shapes that presets have to get right, small: what is repeated, large, skipped, in place or lone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

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


def frozen_body(n_trained: int = 1) -> tuple[nn.Module, Tensor]:
    """A body that is not trained before layers and a head that are, as in transfer learning."""
    body = nn.Sequential(*(Layer() for _ in range(4))).requires_grad_(False)
    return nn.Sequential(body, *(Layer() for _ in range(n_trained)), nn.Linear(WIDTH, 2)), torch.randn(3, 6, WIDTH)


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
        self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        angles = self.angles(x)
        for layer in self.layers:
            x = layer(x, angles)
        return x * self.layers[0].behind(x) if self.twice else x


def decoder(twice: bool = False) -> tuple[nn.Module, Tensor]:
    """`twice`: the model itself calls a part of the first layer at its end, as a DiT does."""
    model = Decoder()
    model.twice = twice
    return model, torch.randn(8, 24, WIDTH)


class Pair(nn.Module):
    """An LSTM reads, another one writes: the whole sequence at once, or by a cell that is called for each word."""

    def __init__(self, *, by_cell: bool) -> None:
        super().__init__()
        self.encoder, self.head, self.by_cell = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 3), by_cell
        self.decoder = nn.LSTMCell(WIDTH, WIDTH) if by_cell else nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        memory, state = self.encoder(x)
        if not self.by_cell:
            return self.head(self.decoder(x, state)[0])
        states = [[part[0] for part in state]]
        for word in x.unbind(1):
            states.append(self.decoder(word, states[-1]))
        return self.head(memory + torch.stack([hidden for hidden, _ in states[1:]], 1))


def lstm_pair(by_cell: bool = False) -> tuple[nn.Module, Tensor]:
    return Pair(by_cell=by_cell), torch.randn(4, 12, WIDTH)


class Adversary(nn.Module):
    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(8, 8, 4), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        )
        convs = norm(nn.Conv2d(3, 8, 3, padding=1)), norm(nn.Conv2d(8, 1, 4))
        self.critic = nn.Sequential(convs[0], nn.BatchNorm2d(8), nn.LeakyReLU(0.2), convs[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(self.generator(x))


def gan(spectral: bool = False) -> tuple[nn.Module, Tensor]:
    """`spectral`: each forward of the critic moves the vectors that normalize its weights."""
    return Adversary(spectral_norm if spectral else lambda conv: conv), torch.randn(8, 8, 1, 1)


class Stemmed(nn.Module):
    """Operations of the model's own forward before and behind its layers, as in a ResNet or a plain U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.layers = nn.ModuleList((conv(8, 8), conv(8, 8)))
        self.last, self.last_norm, self.last_act = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        for layer in self.layers:
            x = x + layer(x)
        return self.last_act(self.last_norm(self.last(x)))


def stemmed() -> tuple[nn.Module, Tensor]:
    return Stemmed(), torch.randn(4, 3, 12, 12)


class Listed(nn.Module):
    """Layers that are lists of their parts, and are never called; with `drop` some are left out at random."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList((nn.LayerNorm(WIDTH), Layer(), nn.Dropout(0.1))) for _ in range(5))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer, dropout in self.layers:
            if torch.rand(()) >= self.drop:
                x = x + dropout(layer(norm(x)))
        return x


class Wrapped(nn.Module):
    """A body that is one block of the model."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(WIDTH, 3), body

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def listed(drop: float = 0.0) -> tuple[nn.Module, Tensor]:
    return Wrapped(Listed(drop)), torch.randn(4, 6, WIDTH)


class Caching(nn.Module):
    """A layer that adds to the cache that it is handed: it cannot run again, its feed-forward part can."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.mlp = nn.Linear(WIDTH, WIDTH), Layer()

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(self.mix(x))
        return self.mlp(x + sum(cache))


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Caching() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, cache)
        return x


def cached() -> tuple[nn.Module, Tensor]:
    return Wrapped(Cached()), torch.randn(4, 6, WIDTH)


class Biased(nn.Module):
    """Hands its bias on, as T5's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x) + bias, bias


class Handing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Biased() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        bias = x.mean(0)
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


def handing() -> tuple[nn.Module, Tensor]:
    return Handing(), torch.randn(4, 6, WIDTH)


class Mnist(nn.Module):
    """The net of PyTorch's own example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.dropout, self.fc1, self.fc2 = nn.Dropout(0.2), nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.conv2(nn.functional.relu(self.conv1(x))))
        return self.fc2(nn.functional.relu(self.fc1(self.dropout(nn.functional.max_pool2d(x, 2)).flatten(1))))


def mnist() -> tuple[nn.Module, Tensor]:
    return Mnist(), torch.randn(2, 1, 12, 12)


def linear() -> tuple[nn.Module, Tensor]:
    return nn.Linear(WIDTH, 2), torch.randn(4, WIDTH)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def one_parameter() -> tuple[nn.Module, Tensor]:
    return Scale(), torch.randn(4, WIDTH)


class Weighing(nn.Module):
    """Attention of one head that also returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = self.mix(x).chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2)
        scores = scores + 1.0
        weights = nn.functional.softmax(scores, dim=-1)
        return weights @ value, weights


class ReturningWeights(nn.Module):
    """A layer that returns its attention's weights beside the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.down = Weighing(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed, weights = self.attention(x)
        return x + self.down(mixed), weights


class HoldingOutputs(nn.Module):
    """A loop whose variable holds the whole output of a layer until the next layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReturningWeights() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            outputs = layer(x)
            x = outputs[0]
        return x


def returning_weights() -> tuple[nn.Module, Tensor]:
    return HoldingOutputs(), torch.randn(2, 96, WIDTH)


class LossInside(nn.Module):
    """The loss is a block of the model, and the step holds it to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.loss = Layer(), nn.Linear(WIDTH, WIDTH), nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.head(self.layer(x)), torch.arange(len(x)) % WIDTH)}


def loss_inside() -> tuple[nn.Module, Tensor]:
    return LossInside(), torch.randn(256, WIDTH)


class HoldsEmbedding(nn.Module):
    """A variable of `forward` holds the input of the dropout, which nothing saves, until forward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.first(x)
        hidden = self.drop(embedded)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden * hidden.detach().repeat(8, 8).mean()


class AroundEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = HoldsEmbedding()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def holding_embedding() -> tuple[nn.Module, Tensor]:
    return AroundEmbedding(), torch.randn(256, WIDTH)
