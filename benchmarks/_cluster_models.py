"""Llama as torchtitan trains it, and its split: written again from the published code of the rows in clusters.py.

Float32 parameters are gathered in bfloat16, gradients are reduced in float32. Each layer is checkpointed whole, or all
but its attention and every second product is made again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

SIZES = {
    "llama-2-7b": {"width": 4096, "n_layers": 32, "heads": 32, "kv_heads": 32, "hidden": 11008, "vocabulary": 32000},
    "llama-3.1-8b": {"width": 4096, "n_layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocabulary": 128256},
    "small": {"width": 64, "n_layers": 4, "heads": 4, "kv_heads": 2, "hidden": 160, "vocabulary": 320},
}
"""Published numbers, and a size for tests."""
aten = torch.ops.aten
PRODUCTS = (
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.head = width // heads
        self.repeats = heads // kv_heads
        self.attention_norm, self.ffn_norm = Norm(width), Norm(width)
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, kv_heads * self.head, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)

    def repeated(self, x: Tensor) -> Tensor:
        if self.repeats == 1:
            return x
        batch, length, heads, head = x.shape
        x = x.unsqueeze(3).expand(batch, length, heads, self.repeats, head)
        return x.reshape(batch, length, heads * self.repeats, head)

    def attended(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = (weight(x).unflatten(-1, (-1, self.head)) for weight in (self.wq, self.wk, self.wv))
        q, k = rotated(q, angles), rotated(k, angles)
        k, v = self.repeated(k), self.repeated(v)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().flatten(2)
        out: Tensor = self.wo(y)
        return out

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        h = x + self.attended(self.attention_norm(x), angles)
        y = self.ffn_norm(h)
        out: Tensor = h + self.w2(F.silu(self.w1(y)) * self.w3(y))
        return out


class Checkpointed(nn.Module):
    """A layer that is made again in backward, all of it or what `save` leaves."""

    def __init__(self, layer: nn.Module, save: Callable[[], Any] | None) -> None:
        super().__init__()
        self.layer = layer
        self.options: dict[str, Any] = {} if save is None else {"context_fn": save}

    def forward(self, *args: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layer, *args, use_reentrant=False, preserve_rng_state=False, **self.options)
        return out


class Llama(nn.Module):
    def __init__(self, shape: dict[str, int], length: int, *, loss_in_float: bool) -> None:
        super().__init__()
        width, heads, vocabulary = shape["width"], shape["heads"], shape["vocabulary"]
        self.loss_in_float = loss_in_float
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, shape["kv_heads"], shape["hidden"]) for _ in range(shape["n_layers"])
        )
        self.norm = Norm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        angles = torch.zeros(length, 1, width // heads // 2)
        self.register_buffer("angles", torch.polar(torch.ones_like(angles), angles))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.angles)
        out: Tensor = self.output(self.norm(x))
        return out if self.loss_in_float else out.float()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(*, batch: int, length: int, loss_in_float: bool = True, **shape: int) -> Any:
    """The model, its tokens, and the loss. `loss_in_float`: the model returns bfloat16, and the loss casts."""
    model = Llama(shape, length, loss_in_float=loss_in_float)
    ids = torch.randint(0, shape["vocabulary"], (batch, length))
    return model, (ids, ids.clone()), loss_of


def every_second_product() -> Any:
    """torchtitan's "selective, op": attention and every second product are kept."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, func: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_product = func is aten.mm.default
        counts[context.is_recompute] += is_product
        kept = func in PRODUCTS and not (is_product and counts[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def split(model: Llama, mesh: DeviceMesh, save: Callable[[], Any] | None = None) -> None:
    """Checkpoints each layer, then shards it; the last layer stays gathered from forward to backward."""
    shard = partial(
        fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    for i, layer in enumerate(model.layers):
        model.layers[i] = Checkpointed(layer, save)
        shard(model.layers[i], reshard_after_forward=i < len(model.layers) - 1)
    shard(model)


def split_selective(model: Llama, mesh: DeviceMesh) -> None:
    split(model, mesh, every_second_product)
