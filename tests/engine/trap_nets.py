"""Tiny models, one trap each: what the comparison has to see, and what the hazards have to foresee.

Each factory returns (model, (inputs, targets), loss). `ref("dropout")` is the reference of `dropout` in this file.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from explorer.record.graph import ModelRef

WIDTH = 8
Built = tuple[nn.Module, tuple[Any, Any], Callable[[Any, Tensor], Tensor]]


def ref(factory: str, **arguments: Any) -> ModelRef:
    return ModelRef(target=f"{__file__}:{factory}", arguments=arguments)


def mean_square(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def built(blocks: list[nn.Module], *, n_samples: int = 8) -> Built:
    """Linear, the blocks, Linear; the blocks are `1`, `2`, ..."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 1))
    return model, (torch.randn(n_samples, WIDTH), torch.randn(n_samples, 1)), mean_square


class Wrapped(nn.Module):
    """Linear, then `trap`, then tanh, so that something is saved after the trap."""

    def __init__(self, trap: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.trap = trap

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.trap(self.linear(x)) * 2)


class Applied(nn.Module):
    """A function as a block."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Around(nn.Module):
    """`entry`, a block under its own name, and `exit`; `calls(block, hidden, x)` calls the block."""

    def __init__(self, calls: Callable[[nn.Module, Tensor, Tensor], Tensor], **block: nn.Module) -> None:
        super().__init__()
        ((self.name, inner),) = block.items()
        self.calls = calls
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.add_module(self.name, inner)
        self.exit = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.exit(self.calls(self.get_submodule(self.name), self.entry(x), x))


def around(calls: Callable[[nn.Module, Tensor, Tensor], Tensor], **block: nn.Module) -> Built:
    return whole(Around(calls, **block))


def whole(model: nn.Module) -> Built:
    return model, (torch.randn(6, WIDTH), torch.randn(6, 1)), mean_square


def plain(n_blocks: int = 2) -> Built:
    return built([Wrapped(nn.GELU()) for _ in range(n_blocks)])


def dropout(n_blocks: int = 2, p: float = 0.3) -> Built:
    return built([Wrapped(nn.Dropout(p)) for _ in range(n_blocks)])


def batch_norm() -> Built:
    return built([Wrapped(nn.BatchNorm1d(WIDTH)) for _ in range(2)])


def rrelu() -> Built:
    return built([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU())], n_samples=64)


def spectral_norm() -> Built:
    return built([Wrapped(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))) for _ in range(2)])


class Counter(nn.Module):
    """An integer buffer that counts forwards; nothing reads it, so that gradients stay equal."""

    n_forwards: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.n_forwards += 1
        return x


def counter() -> Built:
    return built([Wrapped(Counter())])


class PlainCounter(nn.Module):
    """The same as a plain attribute, outside every state_dict; it skips its update where it may."""

    def __init__(self, *, ask: bool = False) -> None:
        super().__init__()
        self.n_forwards = 0
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        from explorer import is_recomputing

        if not (self.ask and is_recomputing()):
            self.n_forwards += 1
        return x


def plain_counter(*, ask: bool = False) -> Built:
    return built([Wrapped(PlainCounter(ask=ask))])


class ReadsItsCounter(nn.Module):
    """A temperature that moves with every forward: what is computed again is something else."""

    def __init__(self, *, ask: bool = False) -> None:
        super().__init__()
        self.temperature = 1.0
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        from explorer import is_recomputing

        if not (self.ask and is_recomputing()):
            self.temperature += 1.0
        return x / self.temperature


def temperature(*, ask: bool = False) -> Built:
    return built([Wrapped(ReadsItsCounter(ask=ask))])


class Noise(nn.Module):
    """Multiplies by noise of one source: `own`, `python`, `numpy`."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.generator = torch.Generator().manual_seed(1) if source == "own" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.source == "own":
            noise = torch.rand(x.shape, generator=self.generator).to(x)
        elif self.source == "python":
            noise = x.new_tensor([random.random() for _ in range(x.shape[1])])
        else:
            noise = torch.from_numpy(np.random.rand(x.shape[1])).to(x)  # noqa: NPY002  the trap itself
        return x * noise


def noise(source: str) -> Built:
    return built([Wrapped(Noise(source)) for _ in range(2)])


def nondeterministic() -> Built:
    """Never the same twice: noise that no seed sets back."""
    return built([Wrapped(Applied(lambda x: x * (1 + 0.01 * random.SystemRandom().random())))])


class NoisyInEval(nn.Module):
    """Noise that no seed sets back, in eval mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x * (1 + 0.01 * random.SystemRandom().random())


def noisy_in_eval() -> Built:
    return built([Wrapped(NoisyInEval())])


class InPlace(nn.Module):
    """Writes into what it is given."""

    def __init__(self, *, copy: bool = False) -> None:
        super().__init__()
        self.copy = copy

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin((x.clone() if self.copy else x).mul_(2))


def in_place(*, copy: bool = False) -> Built:
    return built([InPlace(copy=copy)])


class NeedsCache(nn.Module):
    """Attends over everything it was ever shown, as a decoder with a key/value cache does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, past_key_values: list[Tensor] | None = None) -> Tensor:
        key = self.linear(x)
        if past_key_values is not None:
            past_key_values.append(key)
            key = torch.cat(past_key_values)
        return functional.scaled_dot_product_attention(x[None], key[None], key[None])[0]


def cache(*, use_cache: bool = True) -> Built:
    return around(lambda block, h, _: block(h, past_key_values=[] if use_cache else None), attention=NeedsCache())


def no_cache() -> Built:
    return cache(use_cache=False)


def keyword() -> Built:
    return around(lambda block, h, _: block(x=h), block=Wrapped(nn.Dropout(0.3)))


class DictBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": torch.tanh(self.linear(x))}


def nested() -> Built:
    return around(lambda block, h, _: block(h)["hidden"], block=DictBlock())


class Unused(nn.Module):
    """Reads the weight of a block that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.bypassed = nn.Linear(WIDTH, 1)
        self.called = Wrapped(nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.called(self.entry(x)), self.bypassed.weight, self.bypassed.bias)


def unused() -> Built:
    return whole(Unused())


def shared() -> Built:
    """One cell, three times."""
    return around(lambda cell, h, _: cell(cell(cell(h))), cell=Wrapped(nn.GELU()))


class RecurrentDropout(nn.Module):
    """A cell with dropout that its parent calls three times within one call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Wrapped(nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.cell(x)
        return x


def recurrent_dropout() -> Built:
    return built([RecurrentDropout(), RecurrentDropout()])


class WrongInBackward(torch.autograd.Function):
    """Identity for a parameter; its gradient is right only if `again`, saved for backward, is zero.

    A recompute hands backward the tensors that it saved itself: this is how a wrong is planted in the candidate alone.
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, again: Tensor, wrong: str) -> Tensor:
        ctx.save_for_backward(again)
        ctx.wrong = wrong
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (gradient,), (again,) = gradients, ctx.saved_tensors
        if not again:
            return gradient, None, None
        gradient = gradient.clone()
        if ctx.wrong == "missing":
            return None, None, None
        if ctx.wrong == "scaled":
            gradient *= 1.0001
        if ctx.wrong == "permuted":
            gradient = gradient.flip(0)
        if ctx.wrong == "nan":
            gradient.view(-1)[0] = float("nan")
        return gradient, None, None


class Planted(nn.Module):
    """A linear layer whose weight (or bias, for `permuted`) gets a wrong gradient once it was recomputed."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        from explorer import is_recomputing

        again = torch.tensor(float(is_recomputing()))
        weight, bias = self.linear.weight, self.linear.bias
        if self.wrong == "permuted":
            bias = WrongInBackward.apply(bias, again, self.wrong)
        else:
            weight = WrongInBackward.apply(weight, again, self.wrong)
        return torch.tanh(functional.linear(x, weight, bias))


def planted(wrong: str) -> Built:
    return built([Wrapped(nn.GELU()), Planted(wrong)])


def many_dropouts(p: str) -> Built:
    """64 x 64 elements a mask, so that its share is known to a few percent."""
    model = nn.Sequential(nn.Linear(WIDTH, 64), *(nn.Sequential(nn.Dropout(float(p)), nn.Tanh()) for _ in range(2)))
    return model, (torch.randn(64, WIDTH), torch.randn(64, 64)), mean_square


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, 32)
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.exit = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.exit(self.lstm(torch.tanh(self.entry(x)))[0])


def lstm() -> Built:
    return Recurrent(), (torch.randn(4, 12, WIDTH), torch.randn(4, 12, 1)), mean_square


def noise_in_own_type() -> Built:
    return built([Wrapped(Applied(lambda x: x * torch.rand_like(x))) for _ in range(2)])


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def no_second_order() -> Built:
    return built([Wrapped(Applied(OnceDifferentiable.apply))])


class InPlaceInside(nn.Module):
    """Changes in place what it made itself: no harm, unless the result is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x.mul_(2)
        return torch.sin(x) * torch.cos(x)


def in_place_inside() -> Built:
    return built([InPlaceInside()])


def _two_dropouts(x: Tensor) -> Tensor:
    first = torch.bernoulli(torch.full_like(x, 0.7))
    return torch.tanh(functional.dropout(x * first, 0.3))


def two_dropouts() -> Built:
    """Two masks in one block: keeping the first shifts the random numbers of the second."""
    return built([Wrapped(Applied(_two_dropouts))])


def _flipping(x: Tensor) -> Tensor:
    from explorer import is_recomputing

    return (x[:, :1] if is_recomputing() else x).exp().mean(1, keepdim=True) * x


def branches() -> Built:
    """Saves a wide tensor the first time it runs in a step, and a narrow one when it runs again."""
    return built([Wrapped(Applied(_flipping))])


class Tied(nn.Module):
    """First and last layer share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = nn.Tanh()
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def tied() -> Built:
    return Tied(), (torch.randn(6, WIDTH), torch.randn(6, WIDTH)), mean_square


class ThereAndBack(nn.Module):
    """Calls one cell on both sides of the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.cell = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Tanh()
        self.exit = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.exit(self.cell(self.middle(self.cell(self.entry(x)))))


def there_and_back() -> Built:
    return ThereAndBack(), (torch.randn(6, WIDTH), torch.randn(6, 1)), mean_square


def float32_alone() -> Built:
    return built([Wrapped(Applied(lambda x: x @ torch.eye(x.shape[1])))])


class ComplexFilter(nn.Module):
    """A complex weight whose imaginary part does all the work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(torch.zeros(WIDTH), torch.ones(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x * self.weight).flatten(1)[:, ::2] + (x * self.weight).imag


def complex_filter() -> Built:
    return built([Wrapped(ComplexFilter())])


class Doubles(nn.Module):
    """A float64 table beside float32 weights."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((WIDTH,), 1 + 2.0**-40, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.double() * self.table).to(x.dtype)


def doubles() -> Built:
    return built([Wrapped(Doubles())])


def half() -> Built:
    """Built in bfloat16, batch and all."""
    model, (inputs, targets), loss = built([Wrapped(nn.GELU()), Wrapped(nn.GELU())])
    return model.bfloat16(), (inputs.bfloat16(), targets.bfloat16()), loss


def another_way_in_float64() -> Built:
    return built([Wrapped(Applied(lambda x: x.sin() if x.dtype is torch.float32 else x.cos()))])


class SampledLSTM(Recurrent):
    """Noise in the type of what it is added to, before a fused kernel that rounds differently without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rand_like(x))


def sampled_lstm() -> Built:
    return SampledLSTM(), (torch.randn(4, 12, WIDTH), torch.randn(4, 12, 1)), mean_square


class NormedLSTM(Recurrent):
    """A bias whose gradient is zero in exact arithmetic behind a kernel that rounds differently without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(self.exit.in_features, self.exit.in_features)
        self.norm = nn.BatchNorm1d(self.exit.in_features)
        nn.init.zeros_(self.before.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lstm(torch.tanh(self.entry(x)))[0]
        return self.exit(self.norm(self.before(hidden).flatten(0, 1)).tanh()).view(*x.shape[:2], -1)


def lstm_and_batch_norm() -> Built:
    return NormedLSTM(), (torch.randn(4, 12, WIDTH), torch.randn(4, 12, 1)), mean_square


class Skip(nn.Module):
    """Linear layers with torchgpipe's skip: the first puts its result into a shared store, the last takes it out."""

    def __init__(self, store: Any, role: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.store, self.role = store, role

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        if self.role == "stash":
            self.store["skip"] = x
        elif self.role == "pop":
            x = x * self.store.pop("skip")
        elif self.role == "empty":  # computes without what it removes
            self.store.clear()
        return x


def skips(last: str = "pop") -> Built:
    """Blocks `1.0` (stash), `1.1` and `1.2` (pop)."""
    store: dict[str, Tensor] = {}
    return built([nn.Sequential(*(Skip(store, role) for role in ("stash", "", last)))])


class Memory:
    """A value that two blocks share; neither is handed it."""

    def __init__(self) -> None:
        self.state = torch.ones(WIDTH)


class Carries(nn.Module):
    """Scales by a shared state and moves it. It has no parameter, so no gradient of its own differs."""

    def __init__(self, memory: Any) -> None:
        super().__init__()
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x * self.memory.state)
        self.memory.state = self.memory.state * 0.5 + x.detach().mean(0)
        return x


def carried() -> Built:
    memory = Memory()
    return built([nn.Sequential(nn.Linear(WIDTH, WIDTH), Carries(memory)) for _ in range(2)])


class Queue(nn.Module):
    """Subtracts the mean of a queue of results that two blocks fill."""

    def __init__(self, results: Any) -> None:
        super().__init__()
        self.results = results

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x - torch.stack(list(self.results)).mean(0)) if self.results else torch.tanh(x)
        self.results.append(x.detach().mean(0))
        return x


def queue() -> Built:
    results: Any = deque(maxlen=4)
    return built([nn.Sequential(nn.Linear(WIDTH, WIDTH), Queue(results)) for _ in range(2)])


SCALE = [1.0]


class ReadsGlobal(nn.Module):
    """Scales by a global, which the model's forward moves at its end and sets back at its begin."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            SCALE[0] = self.scale
        return torch.tanh(self.linear(x) * SCALE[0])


def global_scale() -> Built:
    return built([ReadsGlobal(scale) for scale in (1.0, None, None, 3.0)])
