"""Measures what torch's own CUDA code takes beside its results, on imaginary cards, and writes it down.

    PYTHON -m benchmarks.imaginary.make

PYTHON has a CUDA build of torch; no GPU is needed. It writes `tests/golden/imaginary/torch-VERSION.json` and the
version's rows of `explorer/plan/card/workspaces.json`. Torch is imported on the card alone.
"""

from __future__ import annotations

import json
from pathlib import Path

from msgspec.structs import replace

from explorer.engine.imaginary.run import run_on
from explorer.engine.imaginary.torch_build import torch_build
from explorer.plan.card.cards import CARDS
from explorer.plan.card.kernel_scratch import resident_threads

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOLDEN = ROOT / "tests" / "golden" / "imaginary"
WORKSPACES = ROOT / "explorer" / "plan" / "card" / "workspaces.json"
MULTIPROCESSORS = {
    "7.5": 40, "8.0": 108, "8.6": 82, "8.9": 128, "9.0": 132, "10.0": 148, "10.3": 148, "11.0": 20, "12.0": 170
}  # fmt: skip
"""Of a card of each compute capability."""


def main() -> None:
    version = ".".join(torch_build().version.split(".")[:2])
    rows = []
    for capability, n in MULTIPROCESSORS.items():
        card = replace(CARDS["b200"], capability=capability, multiprocessors=n, cublas="")
        threads = {"IMAGINARY_THREADS_PER_MULTIPROCESSOR": str(resident_threads(card))}
        ran = run_on(card, [str(HERE / "operators.py")], threads, capture=True)
        rows.append(json.loads(ran.stdout.splitlines()[-1]))
        print(version, capability, rows[-1]["workspaces"], flush=True)
    lines = ",\n".join(map(json.dumps, rows))
    (GOLDEN / f"torch-{version}.json").write_text(f"[\n{lines}\n]\n")
    known = json.loads(WORKSPACES.read_text()) if WORKSPACES.exists() else {}
    known[version] = {row["capability"]: dict(zip(("cublas", "cublas_lt"), row["workspaces"])) for row in rows}
    WORKSPACES.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
