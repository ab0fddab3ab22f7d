"""Whoever runs a model leaves the process as it was: what a run sets or moves is put back, after an exception too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from explorer.engine.world.rng import RngState


@contextmanager
def left_as_found() -> Iterator[None]:
    """Around everything that runs a model: thread count, generators, gradient mode, autocast's cache."""
    n_threads, rng, grad = torch.get_num_threads(), RngState.capture(None), torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        rng.restore()
        torch.set_num_threads(n_threads)
        torch.clear_autocast_cache()
