"""Calls of single operators, and what torch's own CUDA code holds for each: run as a program, it prints its card's row.

`make.py` runs it on imaginary cards; a real GPU prints its own row. This file needs torch alone.

A program is [operator, type, shapes of its tensors, other arguments, order of the first tensor's dimensions in memory].
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Program = list[Any]


def programs() -> Iterator[Program]:
    """Reductions along each axis, small to beyond 32-bit offsets, and the operators that take whole temporaries."""
    for dtype in ("float32", "bfloat16"):
        for rows in (64, 600, 1500, 2560, 8192, 32768, 1_000_000):
            for columns in (1, 3, 64, 768, 1000, 4096, 50257):
                if rows * columns <= 2**31:
                    for dims in ([0], [1], [0, 1]):
                        yield ["sum.dim_IntList", dtype, [[rows, columns]], [dims], None]
        for name in ("mean.dim", "amax.default", "amin.default", "var.correction", "std.correction", "any.dims"):
            for shape, dims in (([8, 1024, 768], [0, 1]), ([64, 32, 56, 56], [0, 2, 3]), ([5, 100_000], [1])):
                yield [name, dtype, [shape], [dims], None]
        for name in ("linalg_vector_norm.default", "max.dim", "argmax.default", "min.dim", "all.dim"):
            arguments = [2, [0]] if name.startswith("linalg") else [0]
            yield [name, dtype, [[8192, 768]], arguments, None]
        for name in ("sum.default", "mean.default", "max.default", "any.default", "isinf.default"):
            yield [name, dtype, [[1_000_003]], [], None]
        yield ["sum.dim_IntList", dtype, [[16, 512, 64]], [[0, 1]], [2, 0, 1]]
        yield ["sum.dim_IntList", dtype, [[64, 3, 224, 224]], [[0, 2, 3]], [0, 2, 3, 1]]
        yield ["_softmax_backward_data.default", dtype, [[512, 1024], [512, 1024]], [-1, dtype], None]
        yield ["_log_softmax_backward_data.default", dtype, [[512, 1024], [512, 1024]], [-1, dtype], None]
        yield ["roll.default", dtype, [[512, 1024]], [[1, 1], [0, 1]], None]
        for loss in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"):
            for reduction in (0, 1, 2):
                arguments = [None, reduction] if loss == "binary_cross_entropy" else [reduction]
                yield [f"{loss}.default", dtype, [[512, 1024], [512, 1024]], arguments, None]
    for dtype in ("bool", "int32", "int64", "float64"):
        yield ["sum.dim_IntList", dtype, [[4096, 256]], [[0]], None]


NORMS = ((8, 8, 196, 2), (8, 64, 1, 2), (4, 64, 1024, 8), (2, 320, 9, 32))
"""Samples, channels, places and groups."""
HEADS = (
    (2, 4, 130, 200, 0.0),
    (3, 2, 300, 1000, 0.1),
    (20, 30, 70, 400, 0.0),
    (1, 5, 1, 1000, 0.0),
    (2, 1, 96, 77, 0.0),
)
"""Batch, heads, queries, keys and the chance of dropout of an attention."""


def temporaries() -> Iterator[Program]:
    """Group norm, forward and backward, and the backward of the memory-efficient attention.

    A tuple among the arguments is a tensor: its type, its shape, and the host if torch keeps it there.
    """
    for dtype in ("float32", "bfloat16"):
        for n, channels, places, groups in NORMS:
            image, weight, group = (dtype, [n, channels, places]), (dtype, [channels]), (dtype, [n, groups])
            sizes = (n, channels, places, groups)
            yield ["native_group_norm.default", dtype, [], [image, weight, weight, *sizes, 1e-5], None]
            yield ["native_group_norm.default", dtype, [], [image, None, None, *sizes, 1e-5], None]
            for mask in ([True, True, True], [True, False, False], [False, True, True]):
                norm = [image, image, group, group, weight, *sizes, mask]
                yield ["native_group_norm_backward.default", dtype, [], norm, None]
    for dtype in ("float32", "float16", "bfloat16"):
        for head in (8, 64, 72, 96, 104, 128, 136, 256, 264):
            for form in HEADS:
                yield _attention_backward(dtype, head, *form)


def _attention_backward(dtype: str, head: int, *sizes: Any) -> Program:
    n, heads, queries, keys, dropout_p = sizes
    query, key = (dtype, [n, heads, queries, head]), (dtype, [n, heads, keys, head])
    sums = ("float32", [n, heads, -(-queries // 32) * 32])
    seed: tuple[Any, ...] = ("int64", [], "cpu")
    arguments = [query, query, key, key, None, query, sums, seed, seed, dropout_p, [True, True, True, False], False]
    return ["_scaled_dot_product_efficient_attention_backward.default", dtype, [], arguments, None]


def attentions() -> Iterator[list[Any]]:
    """[type, heads of the query, heads of key and value, width of a head, a word for each option]."""
    for dtype in ("bfloat16", "float16", "float32"):
        for width in (6, 64, 128, 160, 192, 200, 256, 264):
            for options in ("", "masked", "dropped", "causal", "no gradient"):
                yield [dtype, 4, 4, width, options]
            yield [dtype, 4, 2, width, "grouped"]
            yield [dtype, 4, 2, width, "grouped masked"]


def attend(attention: list[Any], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and query of an attention."""
    dtype, n_heads, n_key_heads, width, options = attention
    form = {"dtype": getattr(torch, dtype), "device": device, "requires_grad": "no gradient" not in options}
    query = torch.empty(2, n_heads, 128, width, **form)
    key, value = (torch.empty(2, n_key_heads, 128, width, **form) for _ in range(2))
    mask = torch.ones(128, 128, dtype=torch.bool, device=device) if "masked" in options else None
    dropout_p = 0.1 if "dropped" in options else 0.0
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, "causal" in options, enable_gqa="grouped" in options
    )
    return result, query


KERNELS = {
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
}


class _Named(TorchDispatchMode):
    """The fused kernel that ran; empty: plain operators."""

    name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = KERNELS.get(func._opname, self.name)
        return func(*args, **(kwargs or {}))


def kernel_of(attention: list[Any], device: str) -> str:
    with _Named() as named:
        attend(attention, device)
    return named.name


def call(program: Program, device: str) -> Any:
    """A function that runs the operator on tensors that exist already."""
    name, dtype, shapes, others, order = program
    base, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, base), overload)
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape in shapes]
    if order is not None:
        inverse = [order.index(at) for at in range(len(order))]
        laid = torch.empty([shapes[0][at] for at in order], dtype=getattr(torch, dtype), device=device)
        tensors[0] = laid.permute(inverse)
    return operator, (*tensors, *(_argument(other, device) for other in others))


def _argument(other: Any, device: str) -> Any:
    if isinstance(other, tuple):
        dtype, shape, *host = other
        return torch.empty(shape, dtype=getattr(torch, dtype), device=host[0] if host else device)
    return getattr(torch, other) if isinstance(other, str) else other


def _held() -> tuple[int, int]:
    held = torch.cuda.memory_stats()
    return held["requested_bytes.all.peak"], held["requested_bytes.all.current"]


def _is_refused(operator: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether torch has no kernel for the type on this card; the first call also makes what a process keeps."""
    try:
        operator(*arguments)
    except RuntimeError:
        return True
    return False


def measured(program: Program) -> list[int]:
    """Requested bytes that the operator holds at most, and after it; empty: refused."""
    operator, arguments = call(program, "cuda")
    if _is_refused(operator, arguments):
        return []
    torch.cuda.reset_peak_memory_stats()
    _, before = _held()
    kept = operator(*arguments)
    peak, after = _held()
    del kept
    return [peak - before, after - before]


def workspaces() -> list[int]:
    """What the first product of this process keeps for cuBLAS, and the first one with a bias beside it."""
    left = torch.empty(64, 64, device="cuda")
    before = _held()[1]
    product = torch.mm(left, left)
    cublas = _held()[1] - before - product.nbytes
    before = _held()[1]
    biased = torch.addmm(left[0], left, left)
    return [cublas, _held()[1] - before - biased.nbytes]


def here() -> dict[str, Any]:
    """What the card of this process shows."""
    properties = torch.cuda.get_device_properties(0)
    kept = workspaces()
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "workspaces": kept,
        "attention": [kernel_of(attention, "cuda") for attention in attentions()],
        "held": [measured(program) for program in programs()],
        "temporaries": [measured(program) for program in temporaries()],
    }


if __name__ == "__main__":
    print(json.dumps(here()))
