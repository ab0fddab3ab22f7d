"""Detects the begin and end of backward in a user's training loop, which does not announce them.

torch.autograd.backward is replaced meanwhile: Tensor.backward and gradient scalers call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def around_backward(begins: Callable[[], None], ended: Callable[[], None]) -> Iterator[None]:
    """Calls `begins` before each backward and `ended` after it, also after an error; not for a nested backward."""
    plain: Callable[..., Any] = torch.autograd.backward
    inside = False

    def backward(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:  # reentrant checkpointing calls backward inside backward
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
