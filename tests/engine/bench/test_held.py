"""Where memory was refused and nobody recorded, what lay there is told by role and block."""

from __future__ import annotations

import torch
from torch import nn

from explorer.engine.bench.memory import memory_at_refusal
from explorer.engine.device.device import CpuDevice
from explorer.errors import OutOfMemory
from explorer.record.allocations import ROLES


def test_bytes_by_role_and_block_and_why_it_ended() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model(torch.ones(2, 3)).sum().backward()
    kept = torch.zeros(1_000_003)  # reachable, and nobody's
    error = OutOfMemory("No more.", asked_bytes=7)
    run = memory_at_refusal(model, None, CpuDevice(), where="train.py", error=error)
    log = run.allocations
    assert log is not None and run.origin == "recorded" and run.recorded_in == "train.py"
    rows = [(ROLES[role], log.blocks[block], n) for role, block, n in zip(log.role, log.block, log.n_bytes)]
    for fqn, n_elements in (("0", 3 * 4 + 4), ("1", 4 * 5 + 5)):
        for role in ("parameter", "gradient"):
            assert sum(n for one, block, n in rows if (one, block) == (role, fqn)) == 4 * n_elements
    assert ("unattributed", "", 4 * kept.numel()) in rows
    assert run.failure is not None and (run.failure.kind, run.failure.asked_bytes) == ("out of memory", 7)
    assert run.step_peak_bytes is None
