"""Small models with known behaviour, as factories that a ModelRef can name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explorer.record.graph import ModelRef
from tests.engine.trap_nets import Applied


def ref(factory: str, **arguments: Any) -> ModelRef:
    """The factory of this file."""
    return ModelRef(target=f"{Path(__file__).resolve()}:{factory}", arguments=arguments)


class Block(nn.Module):
    """Pre-norm attention with an explicit softmax, then Linear-GELU-Linear-Dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / (d // self.heads) ** 0.5
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        weights = self.dropout(scores.masked_fill(~mask, float("-inf")).softmax(-1))
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).reshape(b, t, d)))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, width: int, depth: int, length: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 8, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(
    *, width: int = 32, depth: int = 4, length: int = 32, vocabulary: int = 50, batch: int = 4, dropout: float = 0.1
) -> tuple[Any, ...]:
    text = torch.randint(vocabulary, (batch, length + 1))
    return Gpt(width, depth, length, vocabulary, dropout), (text[:, :-1], text[:, 1:]), cross_entropy


def chain(*, width: int = 16, depth: int = 4, batch: int = 8) -> tuple[Any, ...]:
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers), torch.randn(batch, width)


class Last(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def lstm(*, width: int = 32, length: int = 24, batch: int = 8) -> tuple[Any, ...]:
    return Last(nn.LSTM(width, width, 2, batch_first=True)), torch.randn(batch, length, width)


def attention(*, width: int = 32, length: int = 32, batch: int = 4) -> tuple[Any, ...]:
    """A fused layer that takes another path when it is watched."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
    return layer, torch.randn(batch, length, width)


class Twice(nn.Module):
    """One weight used many times: its gradients are added up inside backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = torch.tanh(self.cell(x)) + x
        return x


def shared(*, width: int = 64, batch: int = 4) -> tuple[Any, ...]:
    return Twice(width), torch.randn(batch, width)


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        raise ValueError("a tensor of shape [2, 4] does not fit")


def raises() -> tuple[Any, ...]:
    return Raises(), torch.randn(2, 4)


class Greedy(nn.Module):
    """Asks for more memory than any machine has, once its first layer has run."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.n_bytes = n_bytes

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return x + torch.empty(self.n_bytes // 4)[0]


def greedy(*, n_bytes: int = 2**50) -> tuple[Any, ...]:
    return Greedy(n_bytes), torch.randn(256, 64)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return x + self.block(x)


def convolutions() -> tuple[Any, ...]:
    return Convolutions(), torch.randn(2, 3, 16, 16)


class DroppedLayers(nn.Module):
    """LayerDrop: each layer takes part in half of the steps."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = layer(x)
        return x


def dropped_layers(*, width: int = 32, depth: int = 12, batch: int = 512) -> tuple[Any, ...]:
    return DroppedLayers(width, depth), torch.randn(batch, width, requires_grad=True)


class DroppedBranch(nn.Module):
    """Stochastic depth: the block always runs, its branch in half of the steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) if torch.rand(()) < 0.5 else x


def dropped_branches(*, width: int = 16, depth: int = 8, batch: int = 64) -> tuple[Any, ...]:
    return nn.Sequential(*(DroppedBranch(width) for _ in range(depth))), torch.randn(batch, width)


class Whole(nn.Module):
    """Parameters without a module of their own: the only block is the model itself, whose name is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.eye(16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(torch.einsum("bi,ij->bj", x, weight))
        return x


def whole() -> tuple[Any, ...]:
    return Whole(), torch.randn(512, 16)


class Wave(nn.Module):
    """Element by element: all that it keeps is as large as its input, and takes no time to make."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bias).sin().cos()


def wide(mib: int = 4, depth: int = 12) -> Any:
    """Keeps about 10 x `mib` x `depth` MiB; with every block recomputed `depth` + 10 times `mib`."""
    blocks = (nn.Sequential(*(Wave() for _ in range(5))) for _ in range(depth))
    return nn.Sequential(*blocks), torch.zeros(mib, 2**18)


class Penalised(nn.Module):
    """Takes a gradient inside its forward, as a gradient penalty does."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.lin(x).tanh()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


def penalised() -> Any:
    return Penalised(), torch.ones(2, 4)


class Borderline(nn.Module):
    """What its ReLU is given is zero in float32, and a little off in float64: there every second number passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        near = (h * 1e-9 + 1) - 1
        return self.second(h + F.relu(near) * 1e9)


def borderline() -> Any:
    return Borderline(), torch.randn(4, 8)


def amplifying() -> Any:
    """Turns rounding into another number altogether; it draws nothing and decides nothing."""
    return nn.Sequential(nn.Linear(8, 8), Applied(lambda x: (x * 1e8).sin())), torch.randn(4, 8)


class Registry:
    """A class that nobody makes an instance of: state beside the models of carried_nets.py."""

    n_calls = 0


N_CALLS = 0


def bump() -> None:
    """Moves a global of this file."""
    global N_CALLS
    N_CALLS += 1
