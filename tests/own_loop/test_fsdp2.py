"""Every instrument under FSDP2: parameters are DTensors, and gathered ones lie in memory that is freed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, torch, explorer
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, n_ranks = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}/ranks", rank=rank, world_size=n_ranks)
mesh = init_device_mesh("cpu", (n_ranks,))


class Loop:
    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)])
        for part in (*self.model, self.model):
            fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(256, 16)

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def local(self):
        return [p.to_local().clone() for p in self.model.parameters()]


def same(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


plain, watched = Loop(), Loop()
torch.manual_seed(rank)
for _ in range(4):
    plain.step()
draws = torch.get_rng_state()
torch.manual_seed(rank)
watched.step()
with explorer.record_step(watched.model, watched.optimizer) as run:
    watched.step()
with explorer.watch(watched.model, watched.optimizer, at=2, on_oom="oom.explorer") as watch:
    watched.step()
    watched.step()
assert same(plain.local(), watched.local()) and torch.equal(draws, torch.get_rng_state())
n_bytes = sum(shard.nbytes for shard in watched.local())
for one in (run, *watch.runs.values()):
    log = one.measurement.allocations
    held = {role: 0 for role in explorer.record.allocations.ROLES}
    for size, role, born in zip(log.n_bytes, log.role, log.born):
        held[explorer.record.allocations.ROLES[role]] += size if not born else 0
    assert held["parameter"] == n_bytes, held
    assert 2 * n_bytes <= held["optimizer state"] <= 2 * n_bytes + 64, held
    assert [one.measurement.by_fqn[fqn].n_forward for fqn in "012"] == [1, 1, 1]
assert len(watch.runs) == 2

assert explorer.audit(watched.model, watched.step).is_same
plan = explorer.auto_policy(watched.model, watched.step, "90%")
assert plan.policy.units and plan.measured_peak_bytes

def step(model, batch):
    model(batch).square().mean().backward()

def double(model, batch):
    (2 * model(batch).square().mean()).backward()

assert explorer.judge(step, step, watched.model, watched.x).verdict == "bitwise equal"
assert explorer.judge(step, double, watched.model, watched.x).verdict == "different"
assert same(plain.local(), watched.local()) and torch.equal(draws, torch.get_rng_state())
dist.destroy_process_group()
"""


def train(folder: Path, n_ranks: int) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(n_ranks), str(folder)],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(n_ranks)
    ]  # fmt: skip
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(said)


def test_on_a_mesh_of_one(tmp_path: Path) -> None:
    train(tmp_path, 1)


@pytest.mark.slow
def test_on_two_ranks(tmp_path: Path) -> None:
    train(tmp_path, 2)
