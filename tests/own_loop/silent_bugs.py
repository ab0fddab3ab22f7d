"""Bugs that raise nothing and leave a loss that looks fine, each re-made in a few lines after one that somebody had."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.own_loop.program_nets import (
    WIDTH,
    Attention,
    Case,
    Decoder,
    Layer,
    Mlp,
    accumulated,
    adamw,
    backward,
    clipped,
    convolutional,
    decoder,
    loss_of,
    pictures,
    squares,
    swapped,
)  # fmt: skip


def with_dropout() -> nn.Module:
    model = decoder()
    model.layers[1].mlp.drop.p = 0.3
    return model


class LayerForgets(Layer):
    """Checkpointed without the generator that dropout drew from."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)


def last_microbatch(model: nn.Module, batch: Any) -> None:
    for words, targets in zip(*(part.chunk(2) for part in batch)):
        model.zero_grad()
        (loss_of(model, words, targets) / 2).backward()


def statistics_twice(model: nn.Module, batch: Any) -> None:
    checkpoint(model[:3], batch[0], use_reentrant=False).sum()  # a recompute is a second forward
    squares(model, batch)


def clipped_one_by_one(model: nn.Module, batch: Any) -> None:
    accumulated(model, batch)
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_([parameter], 0.5)


def no_divisor(model: nn.Module, batch: Any) -> None:
    model.zero_grad()
    for words, targets in zip(*(part.chunk(2) for part in batch)):
        loss_of(model, words, targets).backward()


def untied(model: nn.Module) -> nn.Module:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    return model


class MlpDetached(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.gelu(self.up(x)).detach()))


class LayerDetached(Layer):
    """The way around the attention lost its gradient: what lies before learns from the MLP's side alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach() + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Unscaled(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2)


class LooksAhead(Attention):
    def mask(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).triu(2)


def clipped_and_cut(model: nn.Module) -> nn.Module:
    """The first layer gets no gradient, and clipping then scales all others otherwise."""
    model.layers[0].register_forward_hook(lambda _, args, out: out.detach())
    return model


def uneven_means(model: nn.Module, batch: Any) -> None:
    """A mean of means of microbatches of five and three."""
    model.zero_grad()
    for words, targets in zip(*(part.split(5) for part in batch)):
        (loss_of(model, words, targets) / 2).backward()


class Coarse(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 1e-2)


def decays_matrices(model: nn.Module, batch: Any) -> None:
    backward(model, batch)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2).step()


def forgets_a_parameter(model: nn.Module, batch: Any) -> None:
    backward(model, batch)
    torch.optim.AdamW([p for name, p in model.named_parameters() if name != "norm.bias"], lr=1e-2).step()


def frozen_statistics(model: nn.Module, batch: Any) -> None:
    model[1].eval()
    squares(model, batch)


class InBfloat16(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def counted_twice(model: nn.Module, batch: Any) -> None:
    """A gradient hook that was registered once more by a second wrapper, and adds its part again."""
    weight = model.layers[0].mlp.up.weight
    hook = weight.register_hook(lambda grad: 2 * grad)
    try:
        backward(model, batch)
    finally:
        hook.remove()


class OneLayerTwice(Decoder):
    """A loop variable that stayed: the first layer runs twice, the second never."""

    def hidden(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for _ in self.layers:
            x = self.layers[0](x)
        return self.norm(x)


def rows() -> Tensor:
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))


def freezes(model: nn.Module) -> nn.Module:
    model.layers[1].attention.k.requires_grad_(False)
    return model


class Averaged(nn.Module):
    """A frozen copy that follows in forward."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times, self.net, self.copy = times, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.copy.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(self.times):
                self.copy.weight.lerp_(self.net.weight, 0.1)
        return self.net(x)


def averaged() -> nn.Module:
    torch.manual_seed(0)
    return Averaged()


def twice_as_often(model: nn.Module) -> nn.Module:
    model.times = 2
    return model


def on_rows(model: nn.Module, x: Any) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.n_calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return self.net(x)


def calls_twice(model: nn.Module, x: Any) -> None:
    with torch.no_grad():
        model(x)
    on_rows(model, x)


def nan_hidden(model: nn.Module, x: Any) -> None:
    """A mask by multiplication: zero times infinity."""
    model.zero_grad()
    out = model(x)
    (out.square().mean() + 0.0 * (out * 0).sqrt().sum()).backward()


BUGS: dict[str, Case] = {
    "dropout without its generator": Case(
        backward, model=with_dropout, rewritten=swapped({"layers.1": LayerForgets}), first=("layers.1.",)
    ),
    "the last microbatch's gradients": Case(last_microbatch, accumulated),
    "statistics twice": Case(statistics_twice, squares, convolutional, batch=pictures, first=("1.running", "1.num_b")),
    "clipped one by one": Case(clipped_one_by_one, clipped),
    "no accumulation divisor": Case(no_divisor, accumulated),
    "tied weight dropped": Case(backward, rewritten=untied, first=("embed.weight", "head.weight")),
    "a detached activation": Case(
        backward, rewritten=swapped({"layers.0.mlp": MlpDetached}), first=("layers.0.mlp.up", "layers.0.between")
    ),
    "a detached way around": Case(
        backward,
        rewritten=swapped({"layers.0": LayerDetached}),
        first=("embed", "layers.0.before", "layers.0.attention"),
    ),
    "no scale": Case(
        backward,
        rewritten=swapped({"layers.1.attention": Unscaled}),
        first=("layers.1.attention.q", "layers.1.attention.k"),
    ),
    "looks ahead": Case(backward, rewritten=swapped({"layers.1.attention": LooksAhead}), first=("layers.1.",)),
    "targets not shifted": Case(lambda model, batch: backward(model, (batch[0], batch[0]))),
    "inputs reversed": Case(lambda model, batch: backward(model, (batch[0].flip(1), batch[1]))),
    "cut off and clipped": Case(clipped, clipped, rewritten=clipped_and_cut),
    "a mean of uneven means": Case(uneven_means),
    "another epsilon": Case(backward, rewritten=swapped({"norm": Coarse}), first=("norm", "layers.1", "embed")),
    "weight decay on biases": Case(
        lambda model, batch: adamw(model, batch, weight_decay=0.1),
        decays_matrices,
        first=("layers.0.before.weight", "layers", "norm"),
    ),
    "a parameter nobody steps": Case(forgets_a_parameter, adamw, first=("norm.bias",)),
    "frozen statistics": Case(frozen_statistics, squares, convolutional, batch=pictures, first=("0.", "1.")),
    "gradients never zeroed": Case(lambda model, batch: loss_of(model, *batch).backward()),
    "a block in bfloat16": Case(backward, rewritten=swapped({"layers.1.mlp": InBfloat16}), first=("layers.1.",)),
    "a gradient counted twice": Case(counted_twice, first=("layers.0.mlp.up.weight",)),
    "one layer twice": Case(backward, rewritten=swapped({"": OneLayerTwice}), first=("layers.1",)),
    "frozen by accident": Case(backward, rewritten=freezes, first=("layers.1.attention.k",)),
    "an average moved twice": Case(
        on_rows, on_rows, averaged, rewritten=twice_as_often, batch=rows, first=("copy.weight",)
    ),
    "a counter moved twice": Case(calls_twice, on_rows, Counted, batch=rows, first=("n_calls",)),
    "nan by a mask": Case(nan_hidden, on_rows, Counted, batch=rows, first=("net",)),
}
