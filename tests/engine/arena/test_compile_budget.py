"""The share that torch.compile is given is what the budget leaves for saved activations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from explorer.engine.arena.compile_budget import contestant
from explorer.record.arena import Bout, Ground


@pytest.mark.parametrize(("budget", "share"), [(100, 1.0), (80, 0.5), (60, 0.0), (10, 0.0), (500, 1.0)])
def test_the_share(budget: int, share: float) -> None:
    """100 bytes at the peak, 40 of them saved activations."""
    compiled: list[bool] = []
    trainee = SimpleNamespace(model=SimpleNamespace(compile=lambda: compiled.append(True)))
    ground = Ground(peak_bytes=100, saved_bytes=40, is_measured=True)
    settings = torch._functorch.config
    with settings.patch(activation_memory_budget=1.0), torch._inductor.config.patch(fallback_random=False):
        entry = contestant(trainee, Bout(rival="compile-budget", budget_bytes=budget), ground)
        assert settings.activation_memory_budget == share and compiled == [True]
    assert entry.note == f"activation_memory_budget = {share:.2f}."
