"""Calls of `zero_grad` while a step is recorded: when gradients go, and whether they go at all.

A training's first step has no gradients to drop, so only the call shows how long later steps hold theirs. The two
methods of torch are replaced while anyone listens, as torch.autograd.backward is in scopes.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from explorer.engine.watch.modes import never_compiled


@contextmanager
def around_zero_grad(called: Callable[[bool], object]) -> Iterator[None]:
    """Calls `called(set_to_none)` at each `zero_grad` of a module or an optimizer."""
    with ExitStack() as opened:
        for kind in (torch.optim.Optimizer, nn.Module):
            plain = kind.zero_grad
            kind.zero_grad = _announced(plain, called)  # type: ignore[method-assign]
            opened.callback(_put_back, kind, plain, kind.zero_grad)
        yield


def _announced(plain: Callable[..., None], called: Callable[[bool], object]) -> Any:
    @never_compiled
    @functools.wraps(plain)
    def zero_grad(owner: object, set_to_none: bool = True) -> None:
        called(set_to_none)
        plain(owner, set_to_none)

    return zero_grad


def _put_back(kind: Any, plain: object, ours: object) -> None:
    if kind.zero_grad is ours:  # else another library has replaced it meanwhile
        kind.zero_grad = plain
