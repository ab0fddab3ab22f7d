"""The published rows of a B200 beside torch's own code on an imaginary one: `PYTHON -m benchmarks.imaginary.published`.

PYTHON has the CUDA build of torch 2.11, as the B200 had. Counted over measured bytes, for the rows whose weights this
machine can hold: an imaginary card makes them on the host first. No rule of `--card` takes part.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from explorer.engine.imaginary.run import run_on
from explorer.plan.card.cards import CARDS

ROWS = json.loads((Path(__file__).parents[2] / "tests" / "golden" / "b200" / "rows.json").read_text())["rows"]
SIZES = ("small", "medium")
N_STEPS = 5
"""Unless the row names the step that it was read at."""


def counted(row: dict[str, Any]) -> list[int]:
    """Allocated and reserved peak of the row's step on the card of this process."""
    import torch
    from msgspec.structs import replace

    from explorer.engine.bench.step import ignore, prepare
    from tests.golden.b200.loop import STEPS, spec_of

    trainee = prepare(replace(spec_of(row), card=None, device="cuda"))
    for _ in range(row.get("step", N_STEPS)):
        torch.cuda.reset_peak_memory_stats()
        list(STEPS[row["scope"]](trainee, ignore) or ())
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


def main() -> None:
    for row in ROWS:
        if row["size"] in SIZES and not row["refused"]:
            command = ["-m", "benchmarks.imaginary.published", row["id"]]
            ran = run_on(CARDS["b200"], command, {"CUBLAS_WORKSPACE_CONFIG": ""}, capture=True)
            if ran.returncode:
                print(f"{row['id']:32} {ran.stderr.strip().splitlines()[-1]}")
                continue
            peaks = zip(("allocated", "reserved"), json.loads(ran.stdout.splitlines()[-1]))
            print(
                f"{row['id']:32}",
                *(f"{kind} {n / row[f'peak_{kind}_bytes'] - 1:+9.4%}" for kind, n in peaks),
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(counted(next(row for row in ROWS if row["id"] == sys.argv[1]))))
    else:
        main()
