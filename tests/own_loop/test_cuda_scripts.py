"""Training scripts with `.cuda()` as people publish them, unmodified on an imaginary card: peak, holders, refusal."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.engine.imaginary.test_run import has_cuda_build
from tests.own_loop.test_published import _FILE, answer, scripts_of

SCRIPTS = Path(__file__).parent / "cuda_scripts.md"
ARGUMENTS: dict[str, tuple[str, str, str]] = json.loads(dict(_FILE.findall(SCRIPTS.read_text()))["arguments.json"])
"""Of each script: for a small step, of a usual size, and to add for a refusal on 24 GiB."""
NEEDS = {"trainer.py": "transformers", "lit.py": "lightning", "accumulate.py": "tqdm"}
RANKS = {"ddp.py": "2", "fsdp.py": "2", "lit.py": "2"}
ROUNDING = 1 << 20  # the allocator counts blocks of 512 bytes, the timeline the bytes that were asked for
INSTALLED = [name for name in ARGUMENTS if importlib.util.find_spec(NEEDS.get(name, "torch"))]
pytestmark = [has_cuda_build, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripts_of(SCRIPTS, tmp_path_factory.mktemp("cuda"))


def on_card(folder: Path, card: str, script: str, arguments: str) -> subprocess.CompletedProcess[str]:
    """A script on an imaginary card, with as many ranks as it needs."""
    ranks = ("--ranks", RANKS[script]) if script in RANKS else ()
    command = ("run", "--card", card, "--json", "--out", f"{script}.explorer", *ranks, script, "--")
    return answer(folder, *command, *arguments.split())


@pytest.mark.parametrize("script", INSTALLED)
def test_the_peak_of_an_unmodified_script_and_what_holds_it(folder: Path, script: str) -> None:
    ran = on_card(folder, "h100", script, ARGUMENTS[script][0])
    assert ran.returncode == 0, ran.stderr[-3000:]
    document = json.loads(ran.stdout)
    step, ranks = document["step"], document["ranks"]  # from the attributed timeline, and from the allocator's counters
    (counted,) = set(re.findall(r"(?:parameters|param count)\D*(\d+)", ran.stderr))
    assert step["n_parameters"] == int(counted) and "(imaginary)" in step["device"]
    assert len(ranks) == int(RANKS.get(script, "1")) and document["refused"] is None
    for rank in ranks:
        assert len(rank["peaks"]) >= 3 and rank["peaks"][-1] == rank["peaks"][-2], "it ends when its peak repeats"
    allocated = max(rank["peaks"][-1][0] for rank in ranks)
    assert 0 <= allocated - step["peak_bytes"] <= ROUNDING and step["peak_bytes"] == sum(step["held"].values())


@pytest.mark.parametrize("script", INSTALLED)
def test_a_refusal_names_operator_block_and_bytes(folder: Path, script: str) -> None:
    ran = on_card(folder, "24GiB", script, " ".join(ARGUMENTS[script][1:]))
    assert ran.returncode == 1, ran.stderr[-3000:]
    refused, step = (json.loads(ran.stdout)[name] for name in ("refused", "step"))
    asked = re.search(r"asked for ([\d,]+) bytes in \S+ of (.+) and was refused; ([\d,]+) bytes were free", refused)
    assert asked is not None and f"Held then: {step['peak_bytes'] / 2**30:.2f} GiB" in refused, refused
    n_bytes, free = (int(asked[i].replace(",", "")) for i in (1, 3))
    assert n_bytes > free and step["peak_bytes"] + n_bytes > 20 << 30
