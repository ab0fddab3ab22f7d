"""Checks of values that a script or torch makes of a tensor with one element. They pass, as those of larger tensors do.

The stubs know a check by its kernel: a boolean that is read right after `all` is true. `all` of one element starts no
kernel, it is a copy, as `any` of one element is. So here `all` gets the element twice.
Only a process that sees the card imports torch, so this file is apart from run.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from unittest.mock import patch

import torch
from torch import Tensor

_CHECKS = ("all", "_is_all_true")
"""Functions of torch and methods of a tensor; torch.distributions checks by the second."""


@contextmanager
def checks_of_one() -> Iterator[None]:
    """Replaces these functions until the exit."""
    with ExitStack() as stack:
        for owner in (Tensor, torch):
            for name in _CHECKS:
                stack.enter_context(patch.object(owner, name, _of_two(getattr(owner, name))))
        yield


def _of_two(check: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(check)
    def checked(*args: Tensor, **options: Tensor) -> Tensor:
        if len(args) == 1 and not options and args[0].is_cuda and args[0].numel() == 1:
            return check(args[0].reshape(1).expand(2))
        return check(*args, **options)

    return checked
