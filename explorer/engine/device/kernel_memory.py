"""Memory of kernels that a step without data would miss: what a result keeps, and what a kernel takes while it runs.

A loss that is reduced keeps the storage that it was first made in, of a value for each element, on every device.
Torch makes that storage, fills it and shrinks the result to one number. A result without data has the number alone.

On a card, sums and other reductions take scratch (`plan/card/kernel_scratch.py`), and some operators temporaries. The
tracker asks here, because the operator's arguments are needed. Sources: ATen/native/cuda of torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from explorer.plan.card.kernel_scratch import HALF_BYTES, Reduction, attention_tile, reduction_scratch
from explorer.plan.card.torch_rules import TORCH_VERSIONS, torch_of
from explorer.record.card import Card

Arguments = dict[str, Any]
Scratch = tuple[tuple[int, ...], ...]
"""Bytes of temporaries: groups one after the other, the members of a group at the same time."""
Rule = Callable[[Arguments, Any, Any], Scratch]
"""Of an operator's arguments, its result and the card."""
REDUCED_LOSSES = {
    "mse_loss": "values",
    "smooth_l1_loss": "values",
    "soft_margin_loss": "mean",
    "binary_cross_entropy": "mean",
    "huber_loss": "values alone",
}
"""What a reduced loss makes beside its result. `values alone`: the result is born with one element."""


VALUE_AND_INDEX = 16
"""Bytes of a value with its index."""


def _accumulator(tensor: Tensor, _: Card) -> int:
    """Bytes in which sums of such elements are added."""
    return 4 if tensor.is_floating_point() and tensor.element_size() <= 4 else 8


def _moments(tensor: Tensor, card: Card) -> int:
    """A mean with its variance and count."""
    return 4 * _accumulator(tensor, card)


def _truth(tensor: Tensor, card: Card) -> int:
    """`any` and `all` leave a truth value; in torch 2.11 a value of the input's type."""
    return tensor.element_size() if torch_of(card) == "2.11" else 1


_PARTS: dict[str, Callable[[Tensor, Card], int]] = {
    "sum mean nansum linalg_vector_norm": _accumulator,
    "amax amin max min": lambda tensor, _: tensor.element_size(),
    "max.dim min.dim argmax argmin": lambda tensor, _: VALUE_AND_INDEX,
    "std var std_mean var_mean": _moments,
    "any all": _truth,
}
PARTS = {name: part for names, part in _PARTS.items() for name in names.split()}
"""What a block of threads leaves for a result, by operator, of the input tensor."""


class KernelMemory:
    """Called with each operator of a step and its result. `card` None: the step runs on the CPU."""

    def __init__(self, card: Card | None) -> None:
        self._card = card
        self._operators: dict[int, tuple[list[str], Rule | None]] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Arguments, out: Any) -> Scratch:
        """Temporaries of the operator; the result gets the storage that torch keeps."""
        if id(func) not in self._operators:
            schema = getattr(func, "_schema", None)
            names = [argument.name for argument in schema.arguments] if schema else []
            self._operators[id(func)] = names, self._rule(str(func))
        names, rule = self._operators[id(func)]
        if rule is None:
            return ()
        arguments = dict(zip(names, args)) | kwargs
        has_no_data = any(is_fake(value) for value in arguments.values() if isinstance(value, Tensor))
        return rule(arguments, out, self._card) if has_no_data else ()

    def _rule(self, operator: str) -> Rule | None:
        library, _, name = operator.partition(".")
        base, _, overload = name.partition(".")
        if library != "aten" or overload in ("other", "names_dim", "out"):
            return None
        if base in REDUCED_LOSSES:
            return partial(_loss, REDUCED_LOSSES[base])
        if self._card is None:
            return None
        part = PARTS.get(name) or PARTS.get(base)
        return partial(_reduction, part) if part else TEMPORARIES.get(base)


def _reduction(part: Callable[[Tensor, Card], int], arguments: Arguments, out: Any, card: Card) -> Scratch:
    """A sum of whole numbers casts them first."""
    tensor, dim = arguments["self"], arguments.get("dim")
    dims = [dim] if isinstance(dim, int) else dim or range(tensor.dim())
    cast: tuple[int, ...] = ()
    if part is PARTS["sum"] and isinstance(out, Tensor) and out.dtype == torch.int64 != tensor.dtype:
        tensor = torch.empty(tensor.shape, dtype=out.dtype, device="meta")
        cast = (tensor.nbytes,)
    reduction = Reduction(
        shape=tuple(tensor.shape),
        strides=tensor.stride(),
        reduced=frozenset(dim % max(tensor.dim(), 1) for dim in dims),
        n_bytes=tensor.element_size(),
        part_bytes=part(tensor, card),
    )
    scratch = reduction_scratch(reduction, card) or ((),)
    return tuple(cast + group for group in scratch)


def _loss(kind: str, arguments: Arguments, out: Tensor, card: Card | None) -> Scratch:
    """A reduced loss holds a storage of all values, and on a card the scratch of their mean."""
    if arguments.get("reduction", 1) == 0:
        return ()
    shape = torch.broadcast_shapes(arguments["self"].shape, arguments["target"].shape)
    values = torch.empty(shape, dtype=out.dtype, device="meta")
    if kind != "values alone":
        out.untyped_storage().resize_(max(values.nbytes, out.nbytes))
    if card is None:
        return ()
    first = out if kind == "mean" else values
    return tuple((first.nbytes, *group) for group in _reduction(PARTS["mean"], {"self": values}, None, card))


def _as_large_as(name: str) -> Rule:
    """A temporary of the size of an argument, such as the product of gradient and softmax."""
    return lambda arguments, *_: ((arguments[name].nbytes,),)


def _rolled(arguments: Arguments, out: Tensor, _: Card) -> Scratch:
    """Each dimension but the last is rolled into a temporary."""
    return ((out.nbytes,),) if len(arguments["shifts"]) > 1 else ()


def _group_norm(arguments: Arguments, _: object, card: Card) -> Scratch:
    """Two factors of each channel. Half precision also has its statistics in float32, since torch 2.13."""
    channel, group, is_scaled = _sums(arguments, card)
    is_cast = arguments["input"].element_size() == HALF_BYTES and torch_of(card) == TORCH_VERSIONS[-1]
    return (((group, group) * is_cast + (channel, channel) * is_scaled),)


def _group_norm_backward(arguments: Arguments, _: object, card: Card) -> Scratch:
    """Two sums of each channel. The gradient of the input also takes two of each group and a factor of each channel."""
    channel, group, is_scaled = _sums(arguments, card)
    return ((channel, channel, *((group, group) + (channel,) * is_scaled) * arguments["output_mask"][0]),)


def _sums(arguments: Arguments, card: Card) -> tuple[int, int, bool]:
    """Bytes of a number for each channel and for each group, and whether channels have factors."""
    n_bytes = arguments["N"] * PARTS["sum"](arguments["input"], card)
    is_scaled = arguments["HxW"] > 1 and arguments["weight"] is not None
    return n_bytes * arguments["C"], n_bytes * arguments["group"], is_scaled


def _flash_backward(arguments: Arguments, *_: object) -> Scratch:
    """Sums in float32 of rows that are padded, and gradients of shared heads, one of each (`mha_bwd`)."""
    query, key = arguments["query"], arguments["key"]
    n_batch, n_heads, length, head = query.shape
    sums = 4 * n_batch * n_heads * _up(length, FLASH_ROWS)
    buffers: tuple[int, ...] = sums, sums * _up(head, 32 if head <= 128 else 64)
    if key.shape[1] != n_heads:
        buffers += (key.nbytes // key.shape[1] * n_heads,) * 2
    return (buffers + _copy(arguments["grad_out"]),)


def _copy(gradient: Tensor) -> tuple[int, ...]:
    """Attention's kernels take a gradient whose heads lie side by side in memory."""
    return () if gradient.transpose(1, 2).is_contiguous() else (gradient.nbytes,)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


FLASH_ROWS = 128
"""Rows of a query to which flash's backward pads its sums."""
KEYS = 64
LOCK_BYTES = 16
"""Beside each tile."""
MOST_SPLITS = 200
"""Parts of the keys, over all heads, that work at the same time where their gradients are summed."""


def _efficient_backward(arguments: Arguments, _: object, card: Card) -> Scratch:
    """Product of gradient and output, its sums, and sums of gradients in float32 (attention_backward.cu)."""
    query, gradient = arguments["query"], arguments["grad_out_"]
    n_batch, n_heads, length, head = query.shape
    is_half = query.element_size() == HALF_BYTES
    rows, columns, sums_keys = attention_tile(card, head, arguments["dropout_p"], is_half=is_half)
    n_calls = n_batch * n_heads
    workspace = _up(length, rows) * _up(head, columns) // (rows * columns) * (4 * rows * columns + LOCK_BYTES)
    if sums_keys:
        n_keys = min(_up(arguments["key"].shape[2], KEYS), KEYS * max(1, MOST_SPLITS // n_calls))
        workspace += 4 * n_keys * (_up(head, rows) + _up(arguments["value"].shape[3], rows))
    sums = (*_copy(gradient), 4 * n_calls * length)
    products = (4 * gradient.numel(), *sums, *sums[-1:] * (n_heads > 1 and length > 1))
    return (products,) * (not is_half) + ((*sums, n_calls * workspace),)


TEMPORARIES: dict[str, Rule] = {
    "_softmax_backward_data": _as_large_as("grad_output"),
    "isinf": _as_large_as("self"),
    "roll": _rolled,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}
"""What an operator of aten takes beside its results."""
