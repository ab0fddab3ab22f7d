"""Trainings on real ranks: each writes its file and together they are one run; every instrument works under FSDP2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from explorer.jobs.run_file import KINDS, files_of_ranks, open_files
from explorer.record.base import from_msgpack
from explorer.record.measurement import RecordedRanks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import gc, os, sys, explorer, highspy, torch, torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

explorer.watch, explorer.record_step, explorer.audit, explorer.auto_policy, explorer.judge
gc.freeze()  # a recording looks at every object
other = os.fork()  # both ranks have what was imported once
rank, n_ranks = int(not other), 2
os.environ["RANK"] = str(rank)


def train(way):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)])
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    if way == "watched":
        explorer.watch(model, optimizer, at=2).save_as("step{step}.explorer")
    x = torch.randn(128 * (rank + 1), 64)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return list(net.state_dict().values())


dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/ranks", rank=rank, world_size=n_ranks)
assert all(map(torch.equal, train("bare"), train("watched")))
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
assert run.save("one.explorer").name == f"one.rank{rank}.explorer"

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
one, two = Loop(), Loop()
explorer.judge(step, step, one.model, one.x, two.model).require("bitwise equal")
assert explorer.judge(step, double, one.model, one.x, two.model).verdict == "different"
dist.destroy_process_group()
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]) if other else 0)
"""


@pytest.mark.slow
def test_ranks_of_ddp_are_one_run_and_every_instrument_works_under_fsdp2(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"},
    )  # fmt: skip
    assert not ran.returncode, ran.stderr
    files = files_of_ranks(tmp_path / "step2.explorer")
    assert [file.name for file in files] == ["step2.rank0.explorer", "step2.rank1.explorer"]
    stored = open_files([file.read_bytes() for file in files])
    run = from_msgpack(stored.record, KINDS[stored.kind])
    assert isinstance(run, RecordedRanks)
    where = f"train.py:{SCRIPT[: SCRIPT.index('explorer.watch(model')].count(chr(10)) + 1}, step 2"
    assert (run.n_ranks, run.missing, run.recorded_in) == (2, (), where)
    assert run.fullest.rank == 1  # its batch is twice as large
    saved = [one.saved_after_forward_bytes or 0 for one in run.ranks]  # no bucket of DDP among them
    assert saved[1] == pytest.approx(2 * saved[0], rel=0.01)
    for one in run.ranks:
        assert [span.phase for span in one.phases if span.phase != "between"] == ["forward", "backward", "optimizer"]
        assert one.by_fqn["module.2"].n_forward == 1
