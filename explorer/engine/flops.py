"""FLOPs counted from shapes by torch's own formulas, plus the operators torch has no formula for.

Torch counts fused attention on CUDA only and fused recurrent layers nowhere; without their operators the same model
would cost less on one device than on the other.
A multiply-add is two FLOPs; element-wise operators count as nothing (torch.utils.flop_counter).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten

Formula = Callable[..., int]


def formula(operator: Any) -> Formula | None:
    """Called with the operator's own arguments and `out_val`; None: counts as nothing.

    `operator` is what a dispatch mode is handed: an OpOverload, or a higher-order operator.
    """
    packet = getattr(operator, "_overloadpacket", operator)
    return OURS.get(packet) or _of_shapes(flop_registry.get(packet))


def _of_shapes(torchs: Formula | None) -> Formula | None:
    """Torch's formula, asked once for each set of shapes: its own walk through every argument costs 30 us a call."""
    inner = getattr(torchs, "__wrapped__", None)
    if inner is None:
        return torchs

    @lru_cache(maxsize=4096)
    def remembered(args: Any, out_shape: Any, kwargs: Any) -> int:
        return int(inner(*args, out_shape=out_shape, **dict(kwargs)))

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return remembered(_shapes(args), _shapes(out_val), _shapes(tuple(kwargs.items())))

    return count


def _shapes(value: Any) -> Any:
    """Shapes where there were tensors, tuples where there were lists."""
    if isinstance(value, torch.Tensor):
        return value.shape
    return tuple(_shapes(part) for part in value) if isinstance(value, (tuple, list)) else value


def _attention(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _recurrent(tokens: Any, *weights: Any, backward: bool = False) -> int:
    """Every token meets every weight matrix once; backward does so twice, for its input and for the weight."""
    n_tokens = tokens.numel() // tokens.shape[-1]
    n_weights = sum(weight.numel() for weight in weights if weight.dim() == 2)
    return 2 * n_tokens * n_weights * (2 if backward else 1)


def _mkldnn_rnn(tokens: Any, *args: Any, out_val: Any = None, **_: Any) -> int:
    return _recurrent(tokens, *args[:4])


def _mkldnn_rnn_backward(tokens: Any, *args: Any, out_val: Any = None, **_: Any) -> int:
    return _recurrent(tokens, *args[:4], backward=True)


def _cudnn_rnn(tokens: Any, weights: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return _recurrent(tokens, *weights)


def _cudnn_rnn_backward(tokens: Any, weights: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return _recurrent(tokens, *weights, backward=True)


def _named(*names: str) -> list[Any]:
    """The operators of these names that this torch has."""
    return [getattr(aten, name) for name in names if hasattr(aten, name)]


OURS: dict[Any, Formula] = {
    **dict.fromkeys(_named("_scaled_dot_product_flash_attention_for_cpu"), _attention),
    **dict.fromkeys(_named("_scaled_dot_product_flash_attention_for_cpu_backward"), _attention_backward),
    **dict.fromkeys(_named("mkldnn_rnn_layer"), _mkldnn_rnn),
    **dict.fromkeys(_named("mkldnn_rnn_layer_backward"), _mkldnn_rnn_backward),
    **dict.fromkeys(_named("_cudnn_rnn"), _cudnn_rnn),
    **dict.fromkeys(_named("_cudnn_rnn_backward"), _cudnn_rnn_backward),
}
