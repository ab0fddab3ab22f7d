"""Tiny models whose blocks run otherwise the second time, or look as if they did: hazards have to tell them apart."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from explorer.record.graph import ModelRef
from tests.engine.trap_nets import WIDTH, Applied, Built, Wrapped, around, built, whole


def ref(factory: str, **arguments: Any) -> ModelRef:
    return ModelRef(target=f"{__file__}:{factory}", arguments=arguments)


class Drawing(nn.Module):
    """Multiplies by noise from a generator object, which stands in an attribute or in a list."""

    def __init__(self, source: str, *, hidden: bool) -> None:
        super().__init__()
        objects = {"python": random.Random(1), "numpy": np.random.default_rng(1), "old": np.random.RandomState(1)}
        self.generator: Any = [objects[source]] if hidden else objects[source]

    def forward(self, x: Tensor) -> Tensor:
        generator = self.generator[0] if isinstance(self.generator, list) else self.generator
        return x * x.new_tensor([generator.random() for _ in range(WIDTH)])


def drawing(source: str, *, hidden: bool = False) -> Built:
    return built([Wrapped(Drawing(source, hidden=hidden))])


HIDDEN = torch.Generator().manual_seed(4)


class FromNowhere(nn.Module):
    """Draws from a generator that no way leads to from the model."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=HIDDEN)


def from_nowhere() -> Built:
    return built([Wrapped(FromNowhere())])


class Seeded(nn.Module):
    """Draws the same noise at every forward, because it sets the generator first."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.generator = torch.Generator() if source == "own" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.source == "own":
            assert self.generator is not None
            return x * torch.rand(x.shape, generator=self.generator.manual_seed(3))
        if self.source == "made":
            return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(3))
        if self.source == "torch":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # the seed that the step itself begins with
                return x * torch.rand(x.shape)
        if self.source == "python":
            random.seed(3)
            return x * x.new_tensor([random.random() for _ in range(WIDTH)])
        np.random.seed(3)  # noqa: NPY002
        return x * torch.from_numpy(np.random.rand(WIDTH)).to(x)  # noqa: NPY002


def seeded(source: str) -> Built:
    return built([Wrapped(Seeded(source))])


class HiddenNorm(nn.Module):
    """Its norm stands in a list, where torch does not find it."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        norms = [nn.BatchNorm1d(WIDTH, affine=False)]
        self.norms = nn.ModuleList(norms) if registered else norms

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norms[0](self.linear(x)))


def hidden_norm(*, registered: bool = False) -> Built:
    return built([HiddenNorm(registered=registered)])


class Renormalised(nn.BatchNorm1d):
    """Normalises with the batch, corrected by running statistics, which it moves first or last."""

    def __init__(self, update: str) -> None:
        super().__init__(WIDTH, affine=False)
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(0), x.var(0, unbiased=False)
        assert self.running_mean is not None and self.running_var is not None
        if self.update == "only":  # an ordinary batch norm, written by hand
            y = (x - mean) / (var + self.eps).sqrt()
        else:
            y = (x - self.running_mean) / (self.running_var + self.eps).sqrt()
        with torch.no_grad():
            self.running_mean += 0.5 * (mean - self.running_mean)
            self.running_var += 0.5 * (var - self.running_var)
        return y


def renormalised(update: str = "last") -> Built:
    return built([Wrapped(Renormalised(update))])


class DenseLayer(nn.Module):
    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, WIDTH)

    def forward(self, features: list[Tensor]) -> Tensor:
        return torch.tanh(self.linear(torch.cat(features, 1)))


class DenseBlock(nn.ModuleDict):
    """torchvision's form: the list that a layer reads grows once the layer has run."""

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


def dense(n_layers: int = 3) -> Built:
    layers = {f"layer{i}": DenseLayer(WIDTH * (1 + i)) for i in range(n_layers)}
    body = DenseBlock(layers)
    return whole(nn.Sequential(nn.Linear(WIDTH, WIDTH), body, nn.Linear(WIDTH * (1 + n_layers), 1)))


class Remembers(nn.Module):
    """Reads what a list, an object or nothing remembers, and adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Any, losses: list[Tensor]) -> Tensor:
        key = self.linear(x)
        if memory is not None:
            entries = memory if isinstance(memory, list) else memory.entries
            entries.append(key)
            key = torch.cat(entries).sigmoid().mean(0)
        if losses is not None:
            losses.append(key.square().mean())
        return torch.tanh(x * key)


class Memory:
    def __init__(self) -> None:
        self.entries: list[Tensor] = []


class HandsOn(nn.Module):
    def __init__(self, memory: str) -> None:
        super().__init__()
        self.entry, self.block, self.exit = nn.Linear(WIDTH, WIDTH), Remembers(), nn.Linear(WIDTH, 1)
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        memory: Any = {"list": [], "object": Memory()}.get(self.memory)
        losses: Any = [] if self.memory == "losses" else None
        y = self.exit(self.block(self.entry(x), memory, losses))
        return y + sum(losses) if losses else y


def remembering(memory: str) -> Built:
    return whole(HandsOn(memory))


class Ignores(nn.Module):
    """Is handed a cache as many blocks are, and leaves it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
        return torch.tanh(self.linear(x))


def unused_cache() -> Built:
    return around(lambda block, h, _: block(h, past_key_values=[]), block=Ignores())


def written_later(*, copy: bool = False) -> Built:
    """The parent writes into what it handed to its block, once the block has run. The block needs nothing of its
    input for backward, so that without a policy nobody minds what becomes of it."""

    def calls(block: nn.Module, h: Tensor, x: Tensor) -> Tensor:
        y = block(h.clone() if copy else h)
        h += 1
        return y + h

    return around(calls, block=Applied(lambda x: torch.sin(x * 2)))


class TakesAPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.tanh(self.linear(x) * pair[0] + pair[1])


def pairs(*, trains: bool = True) -> Built:
    """`trains`: the pair wants gradients."""

    def calls(block: nn.Module, h: Tensor, x: Tensor) -> Tensor:
        source = h if trains else x
        return block(h, (source.sigmoid(), source.exp()))

    return around(calls, block=TakesAPair())


class Flips(nn.Module):
    """In eval mode from the start of backward on."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.block, self.exit = nn.Linear(WIDTH, WIDTH), Wrapped(nn.Dropout(0.3)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.exit(self.block(self.entry(x)))
        y.register_hook(lambda grad: self.eval() and None)
        return y


def flips() -> Built:
    return whole(Flips())


class Board:
    noise = torch.ones(WIDTH)


class Overwrites(nn.Module):
    """Reads the noise that the block before it left, and leaves its own."""

    def __init__(self, board: Board) -> None:
        super().__init__()
        self.linear, self.board = nn.Linear(WIDTH, WIDTH), board

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) * self.board.noise)
        self.board.noise = torch.rand(WIDTH)
        return y


def overwritten() -> Built:
    board = Board()
    return built([Overwrites(board), Overwrites(board)])


class SavesMoreLater(nn.Module):
    """Draws behind its last saved tensor. The recompute reads another scale, and without early stop saves or fails."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.n_calls = nn.Linear(WIDTH, WIDTH), how, 0

    def forward(self, x: Tensor) -> Tensor:
        again, self.n_calls = self.n_calls % 2, self.n_calls + 1
        y = torch.tanh(self.linear(x) * (1.0 + again)) + torch.rand(WIDTH)
        if torch._C._current_graph_task_id() != -1 and self.how == "raises":
            raise RuntimeError("the sampler is empty")
        return y.sin() if again and self.how == "saves" else y


def saves_more_later(how: str) -> Built:
    return built([SavesMoreLater(how)])


class Carries(nn.Module):
    """A hidden state from step to step; early stop leaves the recompute before it is written once more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.hidden = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) + self.hidden)
        self.hidden = y.detach().mean(0)
        return y


def carries() -> Built:
    return built([Carries()])


class Observes(nn.Module):
    """A fake quantiser: its scale follows what it sees, in float32 whatever autocast says."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((), 0.02))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.scale.lerp_(y.abs().max().float() / 127, 0.01)
        return torch.tanh(torch.fake_quantize_per_tensor_affine(y.float(), self.scale, torch.tensor(0), -128, 127))


class Extremes(nn.Module):
    """An observer that begins with the largest value: a recompute in the first step moves nothing."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        with torch.no_grad():
            largest = y.abs().max().to(self.largest.dtype)
            self.largest.copy_(torch.where(self.largest == 0, largest, self.largest.lerp(largest, 0.01)))
        return y.sin()


def extremes() -> Built:
    return built([Extremes()])


def observes() -> Built:
    return built([Observes()])
