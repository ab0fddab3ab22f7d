"""Memory of kernels that a step without data would miss: what a result keeps, and what a kernel takes while it runs.

A loss that is reduced keeps the storage that it was first made in, of a value for each element, on every device.
Torch makes that storage, fills it and shrinks the result to one number. A result without data has the number alone.

On a card, sums and other reductions take scratch (`plan/card/kernel_scratch.py`), and some operators whole temporaries.
The tracker asks here, because the operator's arguments are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from explorer.plan.card.kernel_scratch import Reduction, reduction_scratch
from explorer.plan.card.torch_rules import torch_of
from explorer.record.card import Card

Scratch = tuple[tuple[int, ...], ...]
"""Bytes of temporaries: groups one after the other, the members of a group at the same time."""
aten = torch.ops.aten
REDUCED_LOSSES = {
    aten.mse_loss.default: "values",
    aten.smooth_l1_loss.default: "values",
    aten.soft_margin_loss.default: "mean",
    aten.binary_cross_entropy.default: "mean",
    aten.huber_loss.default: "values alone",
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
        self._operators: dict[int, tuple[tuple[str, ...], Any]] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Scratch:
        """Temporaries of the operator; the result gets the storage that torch keeps."""
        names, rule = self._operators.get(id(func)) or self._learn(func)
        if rule is None:
            return ()
        arguments = dict(zip(names, args)) | kwargs
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        return rule(arguments, out) if any(map(is_fake, tensors)) else ()

    def _learn(self, func: Any) -> tuple[tuple[str, ...], Any]:
        schema = getattr(func, "_schema", None)
        names = tuple(argument.name for argument in schema.arguments) if schema else ()
        learned = self._operators[id(func)] = names, self._rule(func)
        return learned

    def _rule(self, func: Any) -> Callable[[dict[str, Any], Any], Scratch] | None:
        if func in REDUCED_LOSSES:
            return lambda arguments, out: self._loss(REDUCED_LOSSES[func], arguments, out)
        if self._card is None:
            return None
        if func in WHOLE_TEMPORARIES:
            return WHOLE_TEMPORARIES[func]
        library, _, name = str(func).partition(".")
        base, _, overload = name.partition(".")
        part = PARTS.get(name) or PARTS.get(base)
        if library != "aten" or part is None or overload in ("other", "names_dim", "out"):
            return None
        return lambda arguments, out: self._reduction(arguments["self"], arguments.get("dim"), out, part)

    def _reduction(self, tensor: Tensor, dim: Any, out: Any, part: Callable[[Tensor, Card], int]) -> Scratch:
        card = self._card
        assert card is not None
        dims = [dim] if isinstance(dim, int) else list(dim or range(tensor.dim()))
        cast: tuple[int, ...] = ()
        if isinstance(out, Tensor) and out.dtype == torch.int64 and part is PARTS["sum"] and tensor.dtype != out.dtype:
            tensor = torch.empty(tensor.shape, dtype=out.dtype, device="meta")  # whole numbers are cast before the sum
            cast = (tensor.nbytes,)
        reduction = Reduction(
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
            reduced=frozenset(dim % max(tensor.dim(), 1) for dim in dims),
            n_bytes=tensor.element_size(),
            part_bytes=part(tensor, card),
        )
        scratch = reduction_scratch(reduction, card)
        return tuple((*cast, *group) for group in scratch) or ((cast,) if cast else ())

    def _loss(self, kind: str, arguments: dict[str, Any], out: Tensor) -> Scratch:
        """A reduced loss holds a storage of all values, and on a card the scratch of their mean."""
        if arguments.get("reduction", 1) == 0:
            return ()
        shape = torch.broadcast_shapes(arguments["self"].shape, arguments["target"].shape)
        values = torch.empty(shape, dtype=out.dtype, device="meta")
        if kind != "values alone":
            out.untyped_storage().resize_(max(values.nbytes, out.nbytes))
        if self._card is None:
            return ()
        first = out.element_size() if kind == "mean" else values.nbytes
        scratch = self._reduction(values, None, out, PARTS["mean"])
        return tuple((first, *group) for group in scratch) or ((first,),)


def _softmax_backward(arguments: dict[str, Any], _: object) -> Scratch:
    """The product of gradient and softmax."""
    return ((arguments["grad_output"].nbytes,),)


def _absolute(arguments: dict[str, Any], _: object) -> Scratch:
    return ((arguments["self"].nbytes,),)


def _rolled(arguments: dict[str, Any], out: Tensor) -> Scratch:
    """Each dimension but the last is rolled into a temporary."""
    return ((out.nbytes,),) if len(arguments["shifts"]) > 1 else ()


WHOLE_TEMPORARIES: dict[Any, Callable[[dict[str, Any], Any], Scratch]] = {
    aten._softmax_backward_data.default: _softmax_backward,
    aten.isinf.default: _absolute,
    aten.roll.default: _rolled,
}
"""Temporaries as large as a result or an argument."""
