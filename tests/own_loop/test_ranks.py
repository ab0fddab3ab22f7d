"""A training on two real processes: each rank writes its file, and together they are one run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from explorer.jobs.run_file import KINDS, files_of_ranks, open_files
from explorer.record.base import from_msgpack
from explorer.record.measurement import RecordedRanks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch, explorer
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def train(way):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)])
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    if way == "watched":
        explorer.watch(model, optimizer, at=2).save_as("step{step}.explorer")
    x = torch.randn(128 * (distributed.get_rank() + 1), 64)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    torch.save(net.state_dict(), f"{way}{distributed.get_rank()}.pt")


distributed.init_process_group("gloo")
train("bare")
train("watched")
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_of_torchrun_are_one_run_and_the_training_cannot_tell(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    ended = subprocess.run(
        torchrun, cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    for rank in (0, 1):
        bare, watched = (torch.load(tmp_path / f"{way}{rank}.pt") for way in ("bare", "watched"))
        assert all(torch.equal(bare[name], watched[name]) for name in bare) and bare
    files = files_of_ranks(tmp_path / "step2.explorer")
    assert [file.name for file in files] == ["step2.rank0.explorer", "step2.rank1.explorer"]
    stored = open_files([file.read_bytes() for file in files])
    run = from_msgpack(stored.record, KINDS[stored.kind])
    assert isinstance(run, RecordedRanks)
    assert (run.n_ranks, run.missing, run.recorded_in) == (2, (), "train.py:13, step 2")
    assert run.fullest.rank == 1  # its batch is twice as large
    saved = [one.saved_after_forward_bytes or 0 for one in run.ranks]  # no bucket of DDP among them
    assert saved[1] == pytest.approx(2 * saved[0], rel=0.01)
    for one in run.ranks:
        assert [span.phase for span in one.phases if span.phase != "between"] == ["forward", "backward", "optimizer"]
        assert one.by_fqn["module.2"].n_forward == 1
