"""What DistributedDataParallel's own forward allocated and holds is gradient; all else keeps its role."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from explorer.engine.bench.recording import GRADIENT, tag_buckets
from explorer.engine.watch.storages import NONE, Storages
from explorer.engine.watch.tracker import Tracker


class Empties(nn.Module):
    """Allocates in forward and holds on to it, as DDP does with its buckets."""

    held: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held = torch.empty(11)
        return x * 2


@pytest.mark.parametrize("wrapped", [True, False])
def test_buckets_are_those_of_the_wrapper_alone(wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Empties())
    if wrapped:
        monkeypatch.setattr("explorer.engine.bench.recording.DistributedDataParallel", Empties)
    tracker = Tracker(model, torch.device("cpu"), [])
    with tracker:
        tracker.on_phase("forward")
        result = model(torch.ones(3))
        tag_buckets(model, tracker)
    seen = tracker.storages
    roles = [seen.role[i] for i, n_bytes in enumerate(seen.n_bytes) if n_bytes == 44]
    assert result.shape == (3,) and roles == [GRADIENT if wrapped else NONE]


def lists_are_gone(seen: Storages) -> bool:
    """Ranks agree on sizes of buckets in lists of one int32; gloo's threads hold them a moment after the forward."""
    lists = [died for n_bytes, died in zip(seen.n_bytes, seen.died_ns) if n_bytes == 4]
    assert lists
    return NONE not in lists


def test_of_ddp_itself() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(3, 5))
        model(torch.ones(2, 3)).sum().backward()
        tracker = Tracker(model, torch.device("cpu"), [])
        with tracker:
            tracker.on_phase("forward")
            model(torch.ones(2, 3))  # the second forward: buckets are built anew
            seen = tracker.storages
            while not lists_are_gone(seen):
                time.sleep(0.001)
            tag_buckets(model, tracker)
        assert sum(n for n, role in zip(seen.n_bytes, seen.role) if role == GRADIENT) == (3 * 5 + 5) * 4
    finally:
        distributed.destroy_process_group()
