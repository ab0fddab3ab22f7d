"""Actions of a unit besides plain recompute: keeping the results of some operators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts


def operators(names: Sequence[str]) -> tuple[Any, ...]:
    """Operators by name, such as `aten.mm.default`. Raises AttributeError for a name that torch does not have."""
    return tuple(operator(name) for name in names)


def operator(name: str) -> Any:
    """The operator `namespace.operator.overload` of torch.ops. Raises AttributeError for an unknown name."""
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
    """The two contexts of torch's `context_fn`: around the forward, and around each recompute.

    `again` is called at the start of the forward, because it reads the states of the outside generators.
    """
    if not save_ops:
        return contextlib.nullcontext(), again()
    forward, recompute = create_selective_checkpoint_contexts(list(save_ops))
    return forward, _Both(again(), recompute)


class _Both:
    """Two contexts that can be entered together several times; a generator-based context breaks at the second time."""

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
