"""What a unit can do besides plain recompute: keep the results of some operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts


def operators(names: Sequence[str]) -> tuple[Any, ...]:
    """Operators by name, such as `aten.mm.default`. Raises AttributeError for one that torch does not have."""
    return tuple(operator(name) for name in names)


def operator(name: str) -> Any:
    """`namespace.operator.overload` as torch.ops knows it. Raises AttributeError where it knows none."""
    parts = name.split(".")
    if len(parts) != 3:
        raise AttributeError(name)
    part_of_torch: Any = torch.ops
    for part in parts:
        part_of_torch = getattr(part_of_torch, part)
    return part_of_torch


def known_operators() -> list[str]:
    """Every operator of torch as a policy names it."""
    names = (name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names())
    return [name if name.count(".") == 2 else f"{name}.default" for name in names]


def selective_contexts(
    save_ops: tuple[Any, ...], again: Callable[[], AbstractContextManager[Any]]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """torch's `context_fn`: what surrounds the forward, and what surrounds each recompute.

    `again` is built here, when the forward begins: it reads where the outside generators stand.
    """
    if not save_ops:
        return contextlib.nullcontext(), again()
    forward, recompute = create_selective_checkpoint_contexts(list(save_ops))
    return forward, _Both(again(), recompute)


class _Both:
    """Two contexts entered together, again and again: a generator-based one breaks at the second recompute."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._contexts = (outer, inner)
        self._open: list[ExitStack] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._open.append(stack.pop_all())
        return self

    def __exit__(self, *exc: Any) -> None:
        self._open.pop().__exit__(*exc)
