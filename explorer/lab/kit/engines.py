"""The checkpoints that lessons try on the same net: torch's two, with and without a check, and one written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from explorer.engine.world.rng import RngState
from explorer.record.policy import KEEP_ALL, Policy

CHECK_OFF = "non-reentrant, check off"
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "non-reentrant": {},
    CHECK_OFF: {"determinism_check": "none"},
    "reentrant": {"use_reentrant": True},
}
"""torch's options by the name that a row has."""
ENGINES = ("keep", "non-reentrant", "reentrant")


def engine_policy(engine: str, blocks: Sequence[str]) -> Policy:
    """KEEP_ALL for `keep`, else all of `blocks` under one of torch's checkpoints."""
    return KEEP_ALL if engine == "keep" else Policy.recompute(blocks, **CHECKPOINTS[engine])


class WrittenOutCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint in plain sight: one operation whose backward runs the block again, from a snapshot of
    the random generators where there is one, and pulls the gradient through in an inner backward.

    What the inner backward adds to `.grad` is numbers without a graph.
    """

    @staticmethod
    def forward(ctx: Any, block: Callable[[Tensor], Tensor], snapshot: RngState | None, x: Tensor) -> Tensor:
        ctx.block, ctx.snapshot = block, snapshot
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        leaf = x.detach().requires_grad_()
        if ctx.snapshot is not None:
            ctx.snapshot.restore()
        with torch.enable_grad():
            output = ctx.block(leaf)
        torch.autograd.backward(output, gradient)
        return None, None, leaf.grad
