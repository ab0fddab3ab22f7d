"""The checkpoints that lessons try on the same net: torch's two, with and without a check, and one written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from explorer.engine.policy.apply import apply_policy
from explorer.engine.state.rng import RngState
from explorer.lab.kit.bench import Gradients, LabBench, attempt, gradients_of, mean_square
from explorer.lab.kit.nets import BATCH, WIDTH, Dropped, Normed, block_names, chain
from explorer.lab.kit.rows import compared_row
from explorer.record.lab import LabRow
from explorer.record.policy import KEEP_ALL, Policy

CHECK_OFF = "non-reentrant, check off"
CHECKPOINTS: dict[str, dict[str, object]] = {
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
    """A reentrant checkpoint, written out: an operation whose backward runs the block again and calls backward inside.

    A snapshot of the random generators, if given, is restored before the block runs again. The inner backward adds
    numbers without a graph to `.grad`.
    """

    @staticmethod
    def forward(ctx: Any, block: Callable[[Tensor], Tensor], snapshot: RngState | None, x: Tensor) -> Tensor:
        ctx.block, ctx.snapshot = block, snapshot
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> object:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        leaf = x.detach().requires_grad_()
        if ctx.snapshot is not None:
            ctx.snapshot.restore()
        with torch.enable_grad():
            output = ctx.block(leaf)
        torch.autograd.backward(output, gradient)
        return None, None, leaf.grad


def flip_row(bench: LabBench, label: str, layer: str, flip: str) -> LabRow:
    """A row that compares one of CHECKPOINTS with keeping, on blocks with `layer`; `flip`: `between` or `never`."""
    make = partial(Dropped, 0.3) if layer == "dropout" else Normed
    plain, model = (chain(make, 3).to(bench.device) for _ in range(2))
    flips = flip == "between"
    expected = _flipped_step(plain, KEEP_ALL, bench, flips=flips)
    policy = Policy.recompute(block_names(model), **CHECKPOINTS[label])
    return compared_row(label, expected, attempt(partial(_flipped_step, model, policy, bench, flips=flips)))


def _flipped_step(model: nn.Module, policy: Policy, bench: LabBench, *, flips: bool) -> Gradients:
    with apply_policy(model, policy):
        torch.manual_seed(0)
        loss = mean_square(model(bench.normal(BATCH, WIDTH).requires_grad_()))
        if flips:
            model.eval()
        loss.backward()
    return gradients_of(model)
