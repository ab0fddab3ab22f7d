"""`measure --predict --card NAME --verify`: the predicted step beside that of torch's own code on an imaginary card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from explorer.engine.imaginary.run import run_on
from explorer.plan.card.cards import parse_card
from tests.engine.imaginary.test_run import has_cuda, has_cuda_build

ROOT = Path(__file__).resolve().parents[3]
MEASURE = ["-m", "explorer", "measure", "sample_models/gpt.py", "--policy", "every-2", "--predict", "--verify"]
MEASURE += ["--optimizer-form", "fused"]  # its counters lie on the card; test_steps.py has the default
NO_DEFAULTS = {"CUBLAS_WORKSPACE_CONFIG": "", "PYTHONPATH": str(ROOT)}


@has_cuda_build
def test_what_torch_counts_stands_beside_what_is_predicted() -> None:
    """The command itself runs on a card: torch's CUDA build is not imported without the libraries of one."""
    ran = run_on(parse_card("h100"), [*MEASURE, "--card", "h100", "--json"], NO_DEFAULTS, capture=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    document = json.loads(ran.stdout)
    predicted = document["card"]
    assert document["counted"] == [predicted["allocated_bytes"], predicted["reserved_bytes"]]


SAVING = """
import torch
from torch import nn

class Saving(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = self.linear(x)
        wave = torch.complex(y.tanh(), y)
        even, odd = (y * y).chunk(2, -1)
        return torch.cat([even * odd.sigmoid(), odd[::2].t().sin().repeat(1, 2).t()], -1) + (wave.conj() * wave).imag

def build():
    return nn.Sequential(*(Saving() for _ in range(4))), torch.randn(512, 64)
"""
BOTH = {f"blocks.{i}": "recompute" if i % 3 == 1 else "offload" for i in range(12)}
OFFLOADED = (
    ("sample_models/gpt.py", dict.fromkeys(BOTH, "offload"), ("--autocast", "bfloat16")),
    ("sample_models/gpt.py", BOTH, ("--accumulate", "2")),
    ("{folder}/saving.py", {"0": "offload", "1": "offload", "3": "offload"}, ()),
)


@has_cuda_build
@pytest.mark.parametrize(("model", "actions", "options"), OFFLOADED, ids=["all", "and recompute", "kinds of tensors"])
def test_offload_holds_the_bytes_that_are_predicted(
    model: str, actions: dict[str, str], options: tuple[str, ...], tmp_path: Path
) -> None:
    """torch's own code copies to pinned memory in a stream of its own; a card without a clock has copied at once."""
    (tmp_path / "saving.py").write_text(SAVING)
    units = [f"{{blocks: ['{fqn}'], action: {action}}}" for fqn, action in actions.items()]
    (tmp_path / "policy.yaml").write_text(f"version: 1\npolicy: {{units: [{', '.join(units)}]}}")
    words = [model.format(folder=tmp_path), "--policy", f"{tmp_path}/policy.yaml", "--card", "h100", *options]
    words += ["--predict", "--verify", "--optimizer-form", "fused", "--json"]
    ran = run_on(parse_card("h100"), ["-m", "explorer", "measure", *words], NO_DEFAULTS, capture=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    document = json.loads(ran.stdout)
    assert document["counted"][0] == document["card"]["allocated_bytes"]


@pytest.mark.skipif(has_cuda(), reason="needs a CPU build of torch")
def test_without_the_cuda_build_one_sentence_says_what_to_install() -> None:
    ran = subprocess.run(
        [sys.executable, *MEASURE, "--card", "h100"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    text = " ".join(ran.stderr.split())
    assert ran.returncode == 2 and "Traceback" not in text
    assert "built without CUDA" in text and "pip install torch==" in text
