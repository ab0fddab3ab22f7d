"""Where the backward of somebody else's loop begins and ends: nothing in the loop says so.

torch.autograd.backward is taken over meanwhile: Tensor.backward and a gradient scaler go through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def around_backward(begins: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """`begins` is called in front of each backward, `ended` behind it, also where it raises; not for one within."""
    plain: Callable[..., Any] = torch.autograd.backward
    inside = False

    def backward(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:  # reentrant checkpointing calls it from within
            return plain(*args, **kwargs)
        begins()
        inside = True
        try:
            return plain(*args, **kwargs)
        finally:
            inside = False
            ended()

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = plain
