"""The same training step written otherwise: reordered, fused, tiled, wrapped, recomputed, compiled."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import explorer
from tests.own_loop.program_nets import (
    BATCH,
    WORDS,
    Attention,
    Case,
    Decoder,
    Layer,
    Mlp,
    accumulated,
    adamw,
    backward,
    convolutional,
    loss_of,
    pictures,
    squares,
    swapped,
)
from tests.own_loop.silent_bugs import decays_matrices, on_rows, rows, with_dropout


class Fused(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Tiled(Attention):
    """Two queries at a time, with a running maximum over the keys."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        tiles = []
        for start in range(0, x.shape[1], 2):
            scores = self.scores(q[:, :, start : start + 2], k)
            scores = scores.masked_fill(self.mask(x.shape[1])[start : start + 2], -math.inf)
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            tiles.append(weights @ v / weights.sum(-1, keepdim=True))
        return self.out(torch.cat(tiles, 2).transpose(1, 2).flatten(2))


class InDouble(Attention):
    """A softmax that is more exact than the reference's."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = self.scores(q.double(), k.double()).masked_fill(self.mask(x.shape[1]), -math.inf)
        return self.out((scores.softmax(-1).to(x.dtype) @ v).transpose(1, 2).flatten(2))


class NormByHand(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight + self.bias


class GeluByHand(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(up * 0.5 * (1 + torch.erf(up / math.sqrt(2))))


class InHalves(Mlp):
    """The hidden width in two parts, as tensor parallelism has it."""

    def forward(self, x: Tensor) -> Tensor:
        ups = zip(self.up.weight.chunk(2), self.up.bias.chunk(2), self.down.weight.chunk(2, 1))
        return sum(F.linear(F.gelu(F.linear(x, up, bias)), down) for up, bias, down in ups) + self.down.bias


class Again(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class AgainReentrant(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class OneHot(nn.Embedding):
    def forward(self, words: Tensor) -> Tensor:
        return F.one_hot(words, WORDS).to(self.weight.dtype) @ self.weight


class WithoutHead(Decoder):
    """Written anew: the tied matrix has one name."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, words: Tensor) -> Tensor:
        return F.linear(self.hidden(words), self.embed.weight)


def without_head(model: nn.Module) -> nn.Module:
    rewritten = WithoutHead()
    rewritten.load_state_dict({name: value for name, value in model.state_dict().items() if name != "head.weight"})
    return rewritten


def in_eighths(model: nn.Module, batch: Any) -> None:
    model.zero_grad()
    for words, targets in zip(*(part.split(1) for part in batch)):
        (loss_of(model, words, targets) / BATCH).backward()


def head_in_parts(model: nn.Module, batch: Any) -> None:
    """Loss and head a part of the tokens at a time."""
    model.zero_grad()
    hidden, targets = model.hidden(batch[0]).flatten(0, 1), batch[1].flatten()
    parts = zip(hidden.split(10), targets.split(10))
    losses = [F.cross_entropy(model.head(part), words, reduction="sum") for part, words in parts]
    (torch.stack(losses).sum() / len(targets)).backward()


def by_grad(model: nn.Module, batch: Any) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss_of(model, *batch), parameters)):
        parameter.grad = gradient


def functional(model: nn.Module, batch: Any) -> None:
    model.zero_grad()
    logits = functional_call(model, dict(model.named_parameters()), (batch[0],))
    F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).backward()


def looked_at(model: nn.Module, batch: Any) -> None:
    """Gradients are zeroed and not dropped, hooks look at them, and saved tensors leave and come back."""
    hooks = [parameter.register_hook(lambda grad: None) for parameter in model.parameters()]
    try:
        model.zero_grad(set_to_none=False)
        with torch.autograd.graph.save_on_cpu():
            loss_of(model, *batch).backward()
    finally:
        for hook in hooks:
            hook.remove()


def clipped_after_all(model: nn.Module, batch: Any) -> None:
    """Another optimizer step over gradients that only round: a weight that is zero but for rounding must not tell."""
    in_eighths(model, batch)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()


def decays_by_hand(model: nn.Module, batch: Any) -> None:
    backward(model, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1 - 1e-2 * 0.1)
    torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0).step()


def in_bfloat16(model: nn.Module, batch: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        backward(model, batch)


def parts_in_bfloat16(model: nn.Module, batch: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        accumulated(model, batch)


class ByUnfold(nn.Conv2d):
    """A convolution as a matrix product."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2] - 2, x.shape[3] - 2
        product = self.weight.flatten(1) @ F.unfold(x, 3) + self.bias[:, None]
        return product.unflatten(2, (height, width))


class BatchNormByHand(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        mean, n = x.mean((0, 2, 3)), x.numel() / x.shape[1]
        variance = (x - mean[:, None, None]).square().mean((0, 2, 3))
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * n / (n - 1), self.momentum)
            self.num_batches_tracked += 1
        scale = self.weight * (variance + self.eps).rsqrt()
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


def channels_last(model: nn.Module, batch: Any) -> None:
    squares(model, (batch[0].contiguous(memory_format=torch.channels_last), batch[1]))


def without_autograds_help(model: nn.Module, x: Any) -> None:
    """A gradient written by hand."""
    model.zero_grad()
    with torch.no_grad():
        out = model(x)
        slope = 2 * out / out.numel()
        model.weight.grad, model.bias.grad = slope.T @ x, slope.sum(0)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(16, 16)


class Holder(nn.Module):
    """What DDP and others do to the names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def layers_wrapped(model: nn.Module) -> nn.Module:
    model.layers[0], model.layers[1] = map(checkpoint_wrapper, model.layers)
    return Holder(model)


def under_a_policy(model: nn.Module) -> nn.Module:
    explorer.apply_policy(model, explorer.Policy.recompute(["layers.0", "layers.1"]))
    return model


HARMLESS: dict[str, Case] = {
    "blocks by hand": Case(
        backward,
        rewritten=swapped(
            {
                "embed": OneHot,
                "layers.0.attention": Fused,
                "layers.0.mlp": GeluByHand,
                "layers.1.attention": Tiled,
                "layers.1.mlp": InHalves,
                "norm": NormByHand,
            }
        ),
    ),
    "softmax in double, reentrant": Case(
        backward, rewritten=swapped({"layers.0.attention": InDouble, "layers.1": AgainReentrant})
    ),
    "checkpointed, with dropout": Case(backward, model=with_dropout, rewritten=swapped({"layers.1": Again})),
    "written anew": Case(backward, rewritten=without_head),
    "eight microbatches": Case(in_eighths, accumulated),
    "head in parts": Case(head_in_parts),
    "autograd.grad": Case(by_grad),
    "functional_call": Case(functional),
    "hooks that look, tensors elsewhere": Case(looked_at),
    "AdamW over microbatches": Case(clipped_after_all, adamw),
    "weight decay by hand": Case(decays_by_hand, decays_matrices),
    "microbatches in bfloat16": Case(parts_in_bfloat16, in_bfloat16),
    "convolution and BatchNorm by hand": Case(
        squares, squares, convolutional, swapped({"1": BatchNormByHand, "3": ByUnfold}), pictures
    ),
    "a gradient by hand": Case(without_autograds_help, on_rows, linear, batch=rows),
    "wrapped and checkpointed": Case(backward, rewritten=layers_wrapped),
    "under a policy": Case(backward, rewritten=under_a_policy),
}
COMPILED = {"retraced": Case(backward, rewritten=lambda model: torch.compile(model, backend="aot_eager"))}
