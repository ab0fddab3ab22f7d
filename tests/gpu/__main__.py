"""`python -m tests.gpu`: everything that only a GPU can show, in one command and below eight minutes.

python -m tests.gpu                      every check; leaves the folder gpu-report
python -m tests.gpu --only memory time   some files of checks
python -m tests.gpu --device cpu --tiny  the same lines on a CPU, on tiny models
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when CUDA starts; the worker sets it too

import torch

from tests.gpu.kit import Bench
from tests.gpu.runner import run_all, run_child


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-report"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies every limit of time")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--mark", default="", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", default=[])
    asked = parser.parse_args()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print(f"Skipped: torch {torch.__version__} finds no CUDA device here.")
        return 0
    out = asked.out.resolve()
    if asked.child:
        run_child(out, asked.child, asked.mark, asked.only, Bench(asked.device, out, asked.tiny))
        return 0
    child = ["--device", asked.device, *(["--tiny"] if asked.tiny else [])]
    results = run_all(out, child, wanted=asked.only, patience=asked.patience)
    print(*(f"{result.outcome:8} {result.check}" for result in results), f"{out / 'report.md'}", sep="\n")
    return int(any(result.outcome in ("failed", "crashed") for result in results))


if __name__ == "__main__":
    sys.exit(main())
