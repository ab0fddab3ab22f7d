"""FSDP2 on two imaginary cards beside two real ranks: NCCL's stub carries no values, and gloo on the CPU does.

The most bytes of each role at any moment of a step are equal. Temporaries are left out: kernels of the CPU take others.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from explorer.jobs import run_file
from explorer.record.allocations import ROLES
from explorer.record.base import from_msgpack
from explorer.record.measurement import Measurement
from tests.engine.imaginary.test_run import has_cuda_build
from tests.own_loop.test_published import answer

SCRIPT = """
import os
import sys
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

device, rank = sys.argv[1], int(os.environ["LOCAL_RANK"])
distributed.init_process_group("gloo" if device == "cpu" else "nccl")
if device == "cuda":
    torch.cuda.set_device(rank)
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(4)]
model = nn.Sequential(*blocks, nn.Linear(256, 64)).to(device)
mesh = distributed.device_mesh.init_device_mesh(device, (2,))
for part in (*model[:4], model):
    fully_shard(part, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
x = torch.randn(512, 256, device=device)
for _ in range(3):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
distributed.destroy_process_group()
"""
EQUAL = ("parameter", "gradient", "gathered parameter", "reduce-scatter buffer", "saved activation")
ON_THE_HOST = {"optimizer state": 18 * 4, "input": 2 * 4}
"""Bytes that the record of a card leaves out: AdamW's counter of each tensor, and the ranks of the mesh."""


def most_by_role(run: Measurement) -> dict[str, int]:
    """The most bytes of each role at any moment of the step."""
    log = run.allocations
    assert log is not None
    change = np.zeros((len(ROLES), log.n_ticks + 2), dtype=np.int64)
    for role, n_bytes, born, died in zip(log.role, log.n_bytes, log.born, log.died):
        change[role, max(born, 0)] += n_bytes
        change[role, min(died, log.n_ticks + 1)] -= n_bytes
    return {role: int(most) for role, most in zip(ROLES, np.cumsum(change, axis=1).max(axis=1)) if most}


@has_cuda_build
def test_two_imaginary_cards_hold_by_role_what_two_real_ranks_hold(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    held: dict[str, list[dict[str, int]]] = {}
    for device in ("cpu", "cuda"):
        options = ("--card", "h100", "--ranks", "2", "--steps", "2", "--json", "--out", f"{device}.explorer")
        ran = answer(tmp_path, "run", *options, "train.py", "--", device)
        assert ran.returncode == 0, ran.stderr[-3000:]
        files = sorted(tmp_path.glob(f"{device}.rank*.explorer"))
        runs = [from_msgpack(run_file.read(file.read_bytes()).record, Measurement) for file in files]
        held[device] = [most_by_role(run) for run in runs]
    assert len(held["cpu"]) == len(held["cuda"]) == 2
    for real, imaginary in zip(held["cpu"], held["cuda"]):
        assert all(real[role] > 0 for role in EQUAL), real
        assert {role: imaginary[role] for role in EQUAL} == {role: real[role] for role in EQUAL}
        assert {role: real[role] - imaginary[role] for role in ON_THE_HOST} == ON_THE_HOST
