"""Training scripts as they are, with `.cuda()`, on a card that is not there; and without torch's CUDA build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.imaginary.test_run import has_cuda, has_cuda_build

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import torch
from torch import nn
batch = int(sys.argv[1])
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for step in range(1000):
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.randn(batch, 256, device="cuda")).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print("loss", loss.item())
"""


def explorer(folder: Path, *arguments: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "explorer", "run", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(has_cuda(), reason="needs a CPU build of torch")
@pytest.mark.parametrize("options", [("--card", "h100"), ("--at", "1")])
def test_without_the_cuda_build_one_sentence_says_how_to_get_it(options: tuple[str, ...], tmp_path: Path) -> None:
    ran = explorer(tmp_path, *options, "train.py", "--", "8")
    text = " ".join(ran.stderr.split())
    assert ran.returncode == 2 and "Traceback" not in text
    assert "pip install torch==" in text and "whl/cu" in text


@has_cuda_build
def test_a_script_ends_when_its_peak_repeats(tmp_path: Path) -> None:
    ran = explorer(tmp_path, "--card", "h100", "--out", "last.explorer", "train.py", "--", "4096")
    assert ran.returncode == 0, ran.stderr[-3000:]
    steps = [line for line in ran.stdout.splitlines() if "allocated" in line]
    peaks = [line.partition(":")[2] for line in steps]
    assert 3 <= len(steps) <= 10 and peaks[-1] == peaks[-2] != peaks[0]
    assert "loss 0.0" in ran.stdout and "Refused" not in ran.stdout and "(imaginary)" in ran.stdout
    assert (tmp_path / "last.explorer").exists()
    assert "branched on values" not in ran.stdout, "the script reads its loss to print it, GradScaler looks for NaN"


BRANCHES = ("    if loss < 1:", "        pass", "    assert loss.item() < 1e9", "    torch.nonzero(loss > 0)")


@has_cuda_build
def test_lines_that_branch_on_values_are_named(tmp_path: Path) -> None:
    script = SCRIPT + "\n".join(BRANCHES) + "\n"
    first = 1 + SCRIPT.count("\n")
    ran = explorer(tmp_path, "--card", "h100", "--steps", "2", "train.py", "--", "8", script=script)
    assert ran.returncode == 0, ran.stderr[-3000:]
    places = [line.strip().partition(": ")[0] for line in ran.stdout.splitlines() if line.startswith("  train.py:")]
    assert "branched on values" in ran.stdout
    assert places == [f"train.py:{number}" for number in (first, first + 2, first + 3)]


@has_cuda_build
def test_a_script_ends_after_its_steps_or_at_a_refusal(tmp_path: Path) -> None:
    some = explorer(tmp_path, "--card", "h100", "--steps", "2", "--json", "train.py", "--", "64")
    assert len(json.loads(some.stdout.splitlines()[-1])["peaks"]) == 2, some.stderr[-3000:]
    refused = explorer(tmp_path, "--card", "1GiB", "train.py", "--", "65536")
    text = " ".join(refused.stdout.split())
    assert refused.returncode == 1 and "Refused" in text
    assert "Traceback" not in refused.stderr
