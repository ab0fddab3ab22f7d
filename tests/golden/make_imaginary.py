"""Records the golden histories of an imaginary H100, with a CUDA build of torch (`make card` installs one) and no GPU.

    .card/bin/python -m tests.golden.make_imaginary

A pair with and without checkpointing, a refused request, expandable segments, and two ranks of FSDP2. Apart from
make.py, which imports torch: a CUDA build is imported on the imaginary card alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from explorer.engine.imaginary.run import run_on
from explorer.plan.card.cards import parse_card

HERE = Path(__file__).parent
HISTORIES = HERE / "cuda_histories"


def record(part: str, out: Path, settings: str = "") -> None:
    options = {"PYTORCH_ALLOC_CONF": settings} if settings else {}
    program = ["-m", "tests.gpu.programs", str(out), "--only", part]
    run_on(parse_card("h100"), program, options).check_returncode()


if __name__ == "__main__":
    for name in ("gpt-kept", "gpt-recomputed", "refused"):
        record(name, HISTORIES / f"imaginary__{name}.json.gz")
    record("gpt-recomputed", HERE / "imaginary" / "gpt-recomputed-expandable.json.gz", "expandable_segments:True")
    ranks = ["run", "--card", "h100", "--ranks", "2", "tests/gpu/fsdp2_history.py", str(HISTORIES)]
    subprocess.run([sys.executable, "-m", "explorer", *ranks], check=True)
