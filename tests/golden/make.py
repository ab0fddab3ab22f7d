"""Records the golden run that view and plan tests read: a real comparison, small enough to keep.

    python -m tests.golden.make cpu          # writes tests/golden/cpu.msgpack
    python -m tests.golden.make cuda         # the same on a CUDA machine: tests/golden/cuda.msgpack

Figures of time and bytes in it are those of the machine that made it; the tests check laws, not those figures.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from explorer.engine.compare.compare import compare
from explorer.record import ModelRef, Policy, RunSpec
from explorer.record.base import to_msgpack

HERE = Path(__file__).parent
TINY: dict[str, int | float | str | bool] = {
    "n_layers": 4, "width": 32, "n_heads": 2, "length": 64, "batch": 4, "vocabulary": 64, "dropout": 0.1,
}  # fmt: skip


def main(device: str) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when CUDA starts; the worker sets it too
    baseline = RunSpec(
        model=ModelRef(target="sample_models/gpt.py", arguments=TINY),
        device="cuda" if device == "cuda" else "cpu",
        optimizer="sgd",
        n_repeats=3,
    )
    candidate = msgspec.structs.replace(baseline, policy=Policy.recompute(["blocks.0", "blocks.2"]))
    path = HERE / f"{device}.msgpack"
    comparison = compare(baseline, candidate)
    if comparison.failure is not None:
        sys.exit(f"{comparison.failure.sentence} {comparison.failure.hint}")
    path.write_bytes(to_msgpack(comparison))
    sentences = dict.fromkeys([*comparison.baseline.warnings, *comparison.candidate.warnings])
    print(f"{path}: {path.stat().st_size:,} bytes, gradients {comparison.verdict}", *sentences, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
