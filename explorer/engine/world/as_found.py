"""Restores global state (threads, RNG, grad mode) after a model has run, also after an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from explorer.engine.world.rng import RngState


@contextmanager
def left_as_found() -> Iterator[None]:
    """A context that restores thread count, generators, gradient mode and autocast's cache after a run."""
    n_threads, rng, grad = torch.get_num_threads(), RngState.capture(None), torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        rng.restore()
        torch.set_num_threads(n_threads)
        torch.clear_autocast_cache()
