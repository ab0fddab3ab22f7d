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


@pytest.mark.skipif(has_cuda(), reason="needs a CPU build of torch")
def test_without_the_cuda_build_one_sentence_says_what_to_install() -> None:
    ran = subprocess.run(
        [sys.executable, *MEASURE, "--card", "h100"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    text = " ".join(ran.stderr.split())
    assert ran.returncode == 2 and "Traceback" not in text
    assert "built without CUDA" in text and "pip install torch==" in text
