"""The imaginary card against a real one: programs of tests/gpu/programs.py, recorded on an H200 (tests/golden/h200).

Bytes of each step and the sizes of the allocator's events are those of the real card. Left out: operators for which
cuDNN chooses a workspace (convolutions, recurrent layers, its attention), and addresses, which the driver chooses. What
is reserved depends on these addresses.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from explorer.engine.imaginary.run import run_on
from explorer.record.card import Card
from tests.engine.imaginary.test_run import has_cuda_build

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "h200" / "operators.jsonl.gz"
H200 = Card(name="NVIDIA H200", total_bytes=150109880320, taken_bytes=787283968, capability="9.0", multiprocessors=132)


def lines(path: Path) -> dict[str, dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return {f"{line['part']} {line['name']}": line for line in map(json.loads, file) if "name" in line}


SORTS = "layers embedding 4096"
"""The sort's scratch depends on the registers of its kernel, which the stubs do not know: 71,167 bytes for 83,455."""


def bytes_of(line: dict[str, Any]) -> tuple[object, ...]:
    steps = [(step["allocated"], step["requested"], step["left"]) for step in line["steps"]]
    if f"{line['part']} {line['name']}".startswith(SORTS):
        return tuple(steps)
    return *steps, [event[:2] for event in line["events"] if event[0] in "arfo"]


@has_cuda_build
@pytest.mark.parametrize(("part", "n_programs"), [("reductions", 74), ("optimizers", 28), ("layers", 132)])
def test_an_imaginary_h200_holds_what_a_real_one_held(part: str, n_programs: int, tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl.gz"
    without_setting = {"CUBLAS_WORKSPACE_CONFIG": ""}
    ran = run_on(H200, ["-m", "tests.gpu.programs", str(out), "--only", part], without_setting, capture=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    real, imaginary = lines(GOLDEN), lines(out)
    assert len(imaginary) == n_programs
    wrong = {name: (bytes_of(line), bytes_of(real[name])) for name, line in imaginary.items()
             if bytes_of(line) != bytes_of(real[name])}  # fmt: skip
    assert not wrong, f"{len(wrong)} of {n_programs}: {str(wrong)[:2000]}"
