"""What only whole processes show: trainings on real ranks, and the ends of interpreters. One script runs all of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from explorer.jobs.run_file import KINDS, files_of_ranks, open_files
from explorer.record.base import from_msgpack
from explorer.record.measurement import RecordedRanks
from tests.own_loop.test_watch import opened

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import gc, os, resource, sys, torch, torch._dynamo, explorer
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

explorer.watch
gc.freeze()  # a recording looks at every object, and so does an interpreter that ends


def in_a_fork(scene, *arguments):
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        scene(*arguments)
        sys.exit()
    return process


def ends(name, process):
    print(name, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))


def uncaught():
    os.environ.update(RANK="3", WORLD_SIZE="4")
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(2)])
    explorer.watch(model, on_oom="oom.explorer")
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**28, resource.RLIM_INFINITY))
    model(torch.randn(200_000, 512)).sum().backward()


def unfinished():  # torch 2.13: an interpreter that ends while its profiler is on crashes
    model = nn.Linear(4, 4)
    explorer.watch(model, at=1)
    model(torch.ones(1, 4)).sum().backward()


def imports():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with explorer.watch(model, optimizer, on_oom="late.explorer") as watch:
        before = set(sys.modules)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        run = watch.runs[1]
        refused = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."
        assert watch.refused(RuntimeError(refused))
        run.plan("100%")
    late = {name for name in set(sys.modules) - before if name.partition(".")[0] in LIBRARIES}
    assert not late, late


LIBRARIES = ("highspy", "numpy", "plotly", "yaml")
for scene in (uncaught, unfinished, imports):
    ends(scene.__name__, in_a_fork(scene))


def train(way, rank):
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


class Loop:
    def __init__(self, mesh):
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


def step(model, batch):
    model(batch).square().mean().backward()


def double(model, batch):
    (2 * model(batch).square().mean()).backward()


def ranked(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/ranks", rank=rank, world_size=2)
    assert all(map(torch.equal, train("bare", rank), train("watched", rank)))
    gc.collect()  # what a watch or DDP still holds of these nets would be an input of the next recorded step
    mesh = init_device_mesh("cpu", (2,))
    plain, watched = Loop(mesh), Loop(mesh)
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
        for size, role, born, block in zip(log.n_bytes, log.role, log.born, log.block):
            of_the_model = not born and log.blocks[block]
            held[explorer.record.allocations.ROLES[role]] += size if of_the_model else 0
        assert held["parameter"] == n_bytes, held
        assert 2 * n_bytes <= held["optimizer state"] <= 2 * n_bytes + 64, held
        assert [one.measurement.by_fqn[fqn].n_forward for fqn in "012"] == [1, 1, 1]
    assert len(watch.runs) == 2
    assert run.save("one.explorer").name == f"one.rank{rank}.explorer"

    assert explorer.audit(watched.model, watched.step).is_same
    plan = explorer.auto_policy(watched.model, watched.step, "90%")
    assert plan.policy.units and plan.measured_peak_bytes

    assert explorer.judge(step, double, watched.model, watched.x).verdict == "different"
    assert same(plain.local(), watched.local()) and torch.equal(draws, torch.get_rng_state())
    one, two = Loop(mesh), Loop(mesh)
    explorer.judge(step, step, one.model, one.x, two.model).require("bitwise equal")
    dist.destroy_process_group()


import highspy  # both ranks have what was imported once
explorer.record_step, explorer.audit, explorer.auto_policy, explorer.judge
gc.freeze()
ranks = [in_a_fork(ranked, rank) for rank in range(2)]
for rank, process in enumerate(ranks):
    ends(f"rank{rank}", process)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the script ran: all of its parts ended as they should."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=200,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    ends = dict(line.split() for line in ran.stdout.splitlines())
    assert ends == {"uncaught": "1", "unfinished": "0", "imports": "0", "rank0": "0", "rank1": "0"}, ran.stderr
    assert "can't allocate memory" in ran.stderr
    return folder


def test_an_error_that_nobody_catches_is_written_by_its_rank(folder: Path) -> None:
    """A script may also end in the middle of a recorded step, and no library is loaded at a refusal."""
    run = opened(folder / "oom.rank3.explorer")
    assert run.failure is not None and run.failure.kind == "out of memory" and run.recorded_in.endswith("rank 3")


def test_ranks_of_ddp_are_one_run(folder: Path) -> None:
    """Every instrument works under FSDP2: each rank has asserted it."""
    files = files_of_ranks(folder / "step2.explorer")
    assert [file.name for file in files] == ["step2.rank0.explorer", "step2.rank1.explorer"]
    stored = open_files([file.read_bytes() for file in files])
    run = from_msgpack(stored.record, KINDS[stored.kind])
    assert isinstance(run, RecordedRanks)
    where = f"train.py:{SCRIPT[: SCRIPT.index('explorer.watch(model, optimizer, at=2)')].count(chr(10)) + 1}, step 2"
    assert (run.n_ranks, run.missing, run.recorded_in) == (2, (), where)
    assert run.fullest.rank == 1  # its batch is twice as large
    saved = [one.saved_after_forward_bytes or 0 for one in run.ranks]  # no bucket of DDP among them
    assert saved[1] == pytest.approx(2 * saved[0], rel=0.01)
    for one in run.ranks:
        assert [span.phase for span in one.phases if span.phase != "between"] == ["forward", "backward", "optimizer"]
        assert one.by_fqn["module.2"].n_forward == 1


LONG = """
import sys, time, torch
from torch import nn

model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1) if "by-hand" not in sys.argv else None
for i in range(int(sys.argv[1])):
    model(torch.randn(2 ** (8 - abs(3 - i)), 8)).square().mean().backward()
    if optimizer is None:
        with torch.no_grad():
            [p.sub_(p.grad) for p in model.parameters()]
    else:
        optimizer.step()
    print("trained", i + 1, flush=True)
    if "slow" in sys.argv and i > 3:
        time.sleep(60)
"""


def begun(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(LONG)
    command = [sys.executable, "-m", "explorer", "run", "train.py", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "300"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **pipes)


def lines_of(folder: Path, *words: str) -> tuple[list[str], int]:
    process = begun(folder, *words)
    text, _ = process.communicate(timeout=240)
    return text.splitlines(), process.returncode


def test_a_record_is_announced_when_it_is_written_and_ctrl_c_names_it(tmp_path: Path) -> None:
    process = begun(tmp_path, "--at", "2", "--at", "last", "--", "100", "slow")
    assert process.stdout is not None
    lines = []
    while not lines or "trained 5" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    written = next(i for i, line in enumerate(lines) if "Wrote step 2 to step2.explorer" in line)
    assert any("trained 5" in line for line in lines[written:]), "the news came while the training went on"
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=120)
    assert "Interrupted after 5 steps. Kept: step 2 in step2.explorer" in rest and "step 5 in step5.explorer" in rest
    assert process.returncode == 2 and (tmp_path / "step5.explorer").is_file()


def test_stop_ends_the_training_after_the_record_and_worst_of_keeps_the_highest(tmp_path: Path) -> None:
    lines, status = lines_of(tmp_path, "--worst-of", "5", "--stop", "--", "50")
    assert status == 0 and "trained 4" in lines and "trained 5" not in lines
    assert sorted(path.name for path in tmp_path.glob("*.explorer")) == ["step4.explorer"]


def test_a_loop_that_steps_by_hand_is_told_so_at_its_first_backward(tmp_path: Path) -> None:
    lines, status = lines_of(tmp_path, "--at", "2", "--", "3", "by-hand")
    notice = next(i for i, line in enumerate(lines) if "without an optimizer of torch" in line)
    assert lines.index("trained 1") > notice and status == 2
