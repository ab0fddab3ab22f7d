"""Storages under watch: each counted once, followed when it is resized, let go when it dies."""

from __future__ import annotations

import torch

from explorer.engine.bench.recording import tracker_of
from explorer.engine.bench.step import prepare
from explorer.engine.state.global_state import preserve_global_state
from explorer.record import RunSpec
from tests.engine.tiny_nets import ref


def test_a_resized_storage_is_followed() -> None:
    with preserve_global_state():
        trainee = prepare(RunSpec(model=ref("chain")))
        tracker = tracker_of(trainee)
        with tracker:
            held = torch.empty(10)
            held.resize_(1000)
    assert [n for n in tracker.storages.n_bytes[tracker.storages.n_before_step :]] == [40, 4000]
    assert list(tracker.storages.turns[tracker.storages.n_before_step :]) == [
        tracker.storages.n_before_step + 1,
        -tracker.storages.n_before_step - 1,
        tracker.storages.n_before_step + 2,
    ]
