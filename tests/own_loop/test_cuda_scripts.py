"""Training scripts with `.cuda()` as people publish them, unmodified on an imaginary card: peak, holders, refusal.

The second method for the size of a model is the script's own: each prints the number of its parameters. Two figures
of the peak come from different sources, the allocator's counters and the attributed timeline.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.engine.imaginary.test_run import has_cuda_build
from tests.own_loop.published import ARGUMENTS, RANKS, on_card, scripts_of

NEEDS = {"trainer.py": "transformers", "lit.py": "lightning", "accumulate.py": "tqdm"}
ROUNDING = 1 << 20
"""The allocator counts blocks of 512 bytes, the timeline the bytes that were asked for."""
pytestmark = [has_cuda_build, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripts_of("cuda_scripts.md", tmp_path_factory.mktemp("cuda"))


def needed_library(script: str) -> None:
    if importlib.util.find_spec(NEEDS.get(script, "torch")) is None:
        pytest.skip(f"{script} needs {NEEDS[script]}")


@pytest.mark.parametrize("script", ARGUMENTS)
def test_the_peak_of_an_unmodified_script_and_what_holds_it(folder: Path, script: str) -> None:
    needed_library(script)
    ran = on_card(folder, "h100", script, ARGUMENTS[script][0])
    assert ran.returncode == 0, ran.stderr[-3000:]
    document = json.loads(ran.stdout)
    step, ranks = document["step"], document["ranks"]
    (counted,) = set(re.findall(r"(?:parameters|param count)\D*(\d+)", ran.stderr))
    assert step["n_parameters"] == int(counted) and "(imaginary)" in step["device"]
    assert len(ranks) == int(RANKS.get(script, "1")) and document["refused"] is None
    for rank in ranks:
        assert len(rank["peaks"]) >= 3 and rank["peaks"][-1] == rank["peaks"][-2], "it ends when its peak repeats"
        assert all(0 < allocated <= reserved for allocated, reserved in rank["peaks"])
    allocated = max(rank["peaks"][-1][0] for rank in ranks)
    assert 0 <= allocated - step["peak_bytes"] <= ROUNDING and step["peak_bytes"] == sum(step["held"].values())
    assert all("-packages" not in line for line in document["branches"])


@pytest.mark.parametrize("script", ARGUMENTS)
def test_a_refusal_names_operator_block_and_bytes(folder: Path, script: str) -> None:
    needed_library(script)
    ran = on_card(folder, "24GiB", script, " ".join(ARGUMENTS[script][1:]))
    assert ran.returncode == 1, ran.stderr[-3000:]
    document = json.loads(ran.stdout)
    refused, step = document["refused"], document["step"]
    asked = re.search(r"asked for ([\d,]+) bytes in \S+ of (.+) and was refused; ([\d,]+) bytes were free", refused)
    assert asked is not None and f"Held then: {step['peak_bytes'] / 2**30:.2f} GiB" in refused, refused
    n_bytes, free = (int(asked[i].replace(",", "")) for i in (1, 3))
    assert (
        n_bytes > free and step["peak_bytes"] + n_bytes > 20 << 30 and step["peak_bytes"] == sum(step["held"].values())
    )
