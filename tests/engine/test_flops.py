"""FLOPs are exact: against torch's own counter where it counts, against arithmetic where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from explorer.engine.flops import formula
from explorer.engine.recording import tracker_of
from explorer.engine.step import left_as_found, prepare, run_step
from explorer.record import Policy, RunSpec
from tests.engine.tiny_nets import ref


class Count(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := formula(func)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def counted(step: Callable[[], object]) -> int:
    with Count() as count:
        step()
    return count.total


def test_fused_attention_counts_its_two_products() -> None:
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    assert counted(lambda: F.scaled_dot_product_attention(q, k, v)) == 2 * (2 * 2 * 4 * 16 * 16 * 8)


def test_fused_attention_backward_counts_five_products() -> None:
    """Scores once more, then gradients of values, weights, queries and keys."""
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v).sum()
    assert counted(out.backward) == 5 * (2 * 2 * 4 * 16 * 16 * 8)


@pytest.mark.parametrize("n_layers", [1, 2])
def test_a_fused_lstm_multiplies_each_token_with_each_weight(n_layers: int) -> None:
    layer = torch.nn.LSTM(8, 16, n_layers, batch_first=True)
    x = torch.randn(3, 5, 8, requires_grad=True)
    n_weights = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    out, _ = layer(x)
    assert counted(lambda: layer(x)) == 2 * 3 * 5 * n_weights
    assert counted(out.sum().backward) == 2 * 2 * 3 * 5 * n_weights


# One batch entry of the reference GPT (width 256, 6 blocks, 128 tokens, vocabulary 1000, explicit attention):
# every matrix product scales with the batch, so the ratios are those of any batch.
REFERENCE = {"width": 256, "depth": 6, "length": 128, "vocabulary": 1000, "batch": 1}
RATIOS = [
    (Policy(), 0.0, 1.0),
    (Policy.recompute([f"blocks.{i}" for i in range(6)]), 0.0, 1.220),
    (Policy.recompute([f"blocks.{i}" for i in range(6)]), 0.1, 1.317),
    (Policy.recompute([f"blocks.{i}" for i in range(6)], use_reentrant=True), 0.0, 1.317),
    (Policy.recompute(["blocks.0", "blocks.2", "blocks.4"]), 0.0, 1.110),
]


def total_flops(policy: Policy, dropout: float) -> int:
    with left_as_found():
        trainee = prepare(RunSpec(model=ref("gpt", dropout=dropout, **REFERENCE), policy=policy, optimizer="none"))
        with tracker_of(trainee) as tracker:
            run_step(trainee, tracker.on_phase)
    return sum(tracker.flops.values())


@pytest.mark.parametrize(("policy", "dropout", "ratio"), RATIOS)
def test_recompute_costs_what_the_reference_costs(policy: Policy, dropout: float, ratio: float) -> None:
    plain = total_flops(Policy(), dropout)
    assert plain * 4 == pytest.approx(16.490e9, abs=0.001e9)
    assert total_flops(policy, dropout) / plain == pytest.approx(ratio, abs=0.0006)
