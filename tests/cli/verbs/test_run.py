"""A script runs as it is, its chosen steps are written, and what it raises is shown as Python shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from explorer.jobs.run_file import read
from explorer.record import Measurement
from explorer.record.base import from_msgpack

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys, torch
from beside import WIDTH
if __name__ == "__main__":
    assert sys.argv == ["train.py", "--lr", "0.1", "--steps", sys.argv[4]], sys.argv
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.5), torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[2]))
    for i in range(int(sys.argv[4])):
        optimizer.zero_grad()
        model(torch.randn(64, WIDTH)).square().mean().backward()
        optimizer.step()
    print(f"{model[0].weight.double().sum():.17e}")
    if i == 4:
        raise ValueError("the script's own")
    sys.exit()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("WIDTH = 32\n")
    return tmp_path


def python(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT)},
    )


def test_the_script_prints_what_it_prints_alone_and_the_step_is_written(folder: Path) -> None:
    arguments = ("--lr", "0.1", "--steps", "3")
    alone = python(folder, "train.py", *arguments)
    watched = python(
        folder, "-m", "explorer", "run", "train.py", "--at", "2", "--on-oom", "oom.explorer", "--", *arguments
    )
    assert watched.returncode == alone.returncode == 0, watched.stderr
    assert watched.stdout == alone.stdout != ""
    run = from_msgpack(read((folder / "step2.explorer").read_bytes()).record, Measurement)
    assert run.recorded_in == "train.py, step 2" and run.by_fqn["2"].n_forward == 1 and run.spec.optimizer == "sgd"
    assert "step 2" in watched.stderr and "step 1" not in watched.stderr
    assert [path.name for path in folder.glob("*.explorer")] == ["step2.explorer"], (
        "the first is recorded, not asked for"
    )


def test_what_the_script_raises_is_shown_and_what_was_missed_is_said(folder: Path) -> None:
    raised = python(folder, "-m", "explorer", "run", "train.py", "--at", "1", "--", "--lr", "0.1", "--steps", "5")
    assert raised.returncode == 1 and "ValueError: the script's own" in raised.stderr
    assert (folder / "step1.explorer").exists() and "Wrote step 1" in raised.stderr
    missed = python(
        folder, "-m", "explorer", "run", "train.py", "--at", "1", "--at", "2", "--", "--lr", "0.1", "--steps", "1"
    )
    assert missed.returncode == 2 and "took 1 step; of those asked for, 2 could not be written" in missed.stderr
    assert "Wrote step 1" in missed.stderr


def test_a_script_without_an_optimizer_and_no_script_at_all_are_one_sentence(folder: Path) -> None:
    (folder / "none.py").write_text("print('done')\n")
    without = python(folder, "-m", "explorer", "run", "none.py", "--at", "1")
    assert without.returncode == 2 and "made no optimizer" in without.stderr and without.stdout == "done\n"
    assert "no script" in python(folder, "-m", "explorer", "run", "nowhere.py", "--at", "1").stderr
    assert "Nothing to watch" in python(folder, "-m", "explorer", "run", "none.py").stderr
