"""Training scripts as they are, with `.cuda()`, on a card that is not there; and without torch's CUDA build."""

from __future__ import annotations

import json
import os
import re
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


def explorer(
    folder: Path, *arguments: str, verb: str = "run", script: str = SCRIPT
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "BROWSER": "sh -c 'echo $0 >opened.txt' %s"}
    command = [sys.executable, "-m", "explorer", verb, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(has_cuda(), reason="needs a CPU build of torch")
@pytest.mark.parametrize("options", [("--card", "h100"), ("--at", "1")])
def test_without_the_cuda_build_one_sentence_says_how_to_get_it(options: tuple[str, ...], tmp_path: Path) -> None:
    ran = explorer(tmp_path, *options, "train.py", "--", "8")
    text = " ".join(ran.stderr.split())
    assert ran.returncode == 2 and "Traceback" not in text
    assert "pip install torch==" in text and "whl/cu" in text


@has_cuda_build
def test_a_script_on_a_card_says_where_it_ran(tmp_path: Path) -> None:
    ran = explorer(tmp_path, "--card", "h100", "--out", "last.explorer", "train.py", "--", "4096")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "loss 0.0" in ran.stdout and "Refused" not in ran.stdout and "(imaginary)" in ran.stdout
    assert (tmp_path / "last.explorer").exists()
    assert "decide by values" not in ran.stdout, "the script reads its loss to print it, GradScaler looks for NaN"


DECIDED = (
    "if loss < 1: pass", "assert loss.item() < 1e9", "torch.nonzero(loss > 0)", "(loss > 0).nonzero()",
    "torch.where(loss > 0)", "rows[rows > 0]", "rows[0, rows[0] > 0]", "rows.masked_select(rows > 0)",
    "torch.unique(rows)", "rows.unique()", "torch.bincount(rows[0].long())", "torch.argwhere(rows)",
    "rows.repeat_interleave(rows[:, 0].long(), 0)", "torch.equal(rows, rows)", "rows.allclose(rows)",
    "if loss.item() < 1: pass", "pairs.coalesce()", "rare.step()", "newton.step(lambda: rows.sum())",
)  # fmt: skip
"""The last two decide in a file of torch: SparseAdam gathers equal rows, LBFGS ends at a gradient of zero."""
OPEN = (
    "loss.item()", "rows[0], rows[..., 1:], rows[None]", "torch.where(loss > 0, loss, 0.0)",
    "rows.repeat_interleave(2)", "rows[rows[:, 0].long()]", "rows[rows > 0] = 0", "torch.unique(torch.ones(3))",
    "if step % 1 == 0: print(f'loss {loss.item():.4f}')", "if step < 9 and rows[0: 1].sum() is not None: float(loss)",
)  # fmt: skip
BEFORE = (
    "rows = torch.zeros(4, 4, device=loss.device)",
    "table, weight = (nn.Parameter(torch.zeros(4, 4, device=loss.device)) for _ in range(2))",
    "newton, rare = torch.optim.LBFGS([weight]), torch.optim.SparseAdam([table])",
    "weight.grad = torch.zeros_like(weight)",
    "pairs = torch.sparse_coo_tensor([[0, 0]], torch.zeros(2, 4), (4, 4), device=loss.device)",
    "table.grad = pairs",
)


@has_cuda_build
def test_lines_that_branch_on_values_are_named(tmp_path: Path) -> None:
    script = SCRIPT + "".join(f"    {line}\n" for line in (*BEFORE, *DECIDED, *OPEN))
    first = 1 + len(BEFORE) + SCRIPT.count("\n")
    ran = explorer(tmp_path, "--card", "h100", "--steps", "2", "train.py", "--", "8", script=script)
    assert ran.returncode == 0, ran.stderr[-3000:]
    places = [line.strip().partition(": ")[0] for line in ran.stdout.splitlines() if line.startswith("  train.py:")]
    assert "decide by values" in ran.stdout and ran.stdout.count(" reserved\n") == 2
    assert places == [f"train.py:{first + n}" for n in range(len(DECIDED))]


@has_cuda_build
def test_an_error_of_a_script_says_that_values_are_zeros(tmp_path: Path) -> None:
    script = SCRIPT + "    assert model[0][0].weight.abs().sum().item() > 0, 'no weights'\n"
    ran = explorer(tmp_path, "--card", "h100", "train.py", "--", "8", script=script)
    assert ran.returncode == 1 and "no weights" in ran.stderr
    assert ran.stderr.rstrip().endswith(
        "Values are zeros on an imaginary card: an error about values need not come on a real one."
    )


@has_cuda_build
def test_checkpoints_of_the_script_are_listed_on_a_card_too(tmp_path: Path) -> None:
    rerun = "model.forward = lambda x: torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=False)"
    script = SCRIPT.replace("optimizer = ", f"import torch.utils.checkpoint\n{rerun}\noptimizer = ", 1)
    ran = explorer(tmp_path, "--card", "h100", "--steps", "2", "train.py", "--", "8", script=script)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "Checkpointing by the model itself" in ran.stdout


@has_cuda_build
def test_the_setting_for_workspaces_lowers_the_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--card", "h100", "--steps", "2", "train.py", "--", "8")
    before = explorer(tmp_path, *options).stdout
    (name, setting), *_ = re.findall(r"Helps .*workspaces of cuBLAS .*: (CUBLAS\w+)=(\S+)", before)
    monkeypatch.setenv(name, setting)
    peaks = [re.findall(r"Step 2: ([\d.]+) MiB", text)[0] for text in (before, explorer(tmp_path, *options).stdout)]
    assert float(peaks[0]) - float(peaks[1]) > 60, "two threads kept 32 MiB each"


@has_cuda_build
def test_a_script_that_asks_for_a_gpu_has_one_document_on_stdout(tmp_path: Path) -> None:
    ran = explorer(tmp_path, "train.py", "--json", "--", "8")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout)["peaks"] and "loss 0.0" in ran.stderr


@has_cuda_build
def test_the_first_command_writes_and_opens_its_page_of_a_card(tmp_path: Path) -> None:
    ran = explorer(tmp_path, "train.py", "--html", "page.html", "--open", "--json", "--", "64", verb="show")
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert json.loads(ran.stdout)["peaks"] and "loss 0.0" in ran.stderr
    assert "H100 80GB (imaginary)" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "opened.txt").read_text().strip().endswith("page.html")


EARLY = SCRIPT.replace("batch = ", "torch.empty(4 << 30, device='cuda'); batch = ")


@has_cuda_build
@pytest.mark.parametrize(("script", "has_page"), [(SCRIPT, True), (EARLY, False)])
def test_a_refused_step_has_its_page_and_a_sentence_says_why_there_is_none(
    script: str, has_page: bool, tmp_path: Path
) -> None:
    options = ("--card", "1GiB", "--html", "page.html")
    ran = explorer(tmp_path, "train.py", *options, "--", "100000", verb="show", script=script)
    assert ran.returncode == 1 and "Refused" in ran.stdout and "Traceback" not in ran.stderr
    assert ("No page was written" in ran.stderr) != has_page
    assert (tmp_path / "page.html").exists() == has_page


@has_cuda_build
def test_a_record_of_a_card_is_planned_for_a_card(tmp_path: Path) -> None:
    recorded = explorer(tmp_path, "--card", "h100", "--json", "--out", "last.explorer", "train.py", "--", "8192")
    allocated, reserved = json.loads(recorded.stdout)["peaks"][-1]
    plans = [
        json.loads(explorer(tmp_path, "last.explorer", "--card", card, "--json", verb="plan").stdout)
        for card in ("h100", "1100MiB")
    ]
    for plan in plans:
        assert "failure" not in plan, plan
        first, chosen = plan["first_run"], plan["measured"]
        assert plan["met"] and abs(first["step_peak_bytes"] - allocated) < 1 << 20
        assert (chosen["reserved_bytes"] == reserved) == (not plan["plan"]["policy"]["units"])
    assert [bool(plan["plan"]["policy"]["units"]) for plan in plans] == [False, True]
    assert plans[1]["measured"]["reserved_bytes"] <= plans[1]["plan"]["budget_bytes"] < reserved
