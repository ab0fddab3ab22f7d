"""Ten training scripts with `.cuda()`, unmodified and of a usual size, on an imaginary H100 and on a card of 24 GiB.

    PYTHON -m benchmarks.imaginary.scripts [SCRIPT...]

PYTHON has a CUDA build of torch, transformers and lightning; no GPU is needed. The scripts are those of
tests/own_loop/cuda_scripts.md. Each row has the peak of a rank, what holds it, and the first request that is refused.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from explorer.errors import BadInput
from tests.own_loop.test_cuda_scripts import ARGUMENTS, SCRIPTS, on_card
from tests.own_loop.test_published import scripts_of

CARDS = ("h100", "24GiB")


def main(chosen: list[str]) -> int:
    print(
        "| script | card | allocated, reserved | held by | refused | seconds |\n|---|---|---|---|---|---|", flush=True
    )
    with tempfile.TemporaryDirectory() as name:
        folder = scripts_of(SCRIPTS, Path(name))
        for script in chosen or ARGUMENTS:
            _, usual, larger = ARGUMENTS[script]
            for card, arguments in zip((*CARDS, CARDS[-1]), (usual, usual, f"{usual} {larger}")):
                print(f"| `{script} {arguments}` | {card} |{_row(folder, card, script, arguments)}", flush=True)
    return 0


def _row(folder: Path, card: str, script: str, arguments: str) -> str:
    began = time.monotonic()
    ran = on_card(folder, card, script, arguments)
    if ran.returncode not in (0, 1) or not ran.stdout.startswith("{"):
        raise BadInput(f"{script} ended with code {ran.returncode}.", hint=ran.stderr[-2000:])
    document = json.loads(ran.stdout)
    peaks, step = document["peaks"], document["step"]
    last = " of ".join(_gib(n_bytes) for n_bytes in peaks[-1]) if peaks else "no step ended"
    held = ", ".join(f"{_gib(n_bytes)} {role}" for role, n_bytes in list(step["held"].items())[:3])
    refused = (document["refused"] or "").partition(". ")[0]
    return f" {last} | {held} | {refused} | {time.monotonic() - began:.0f} |"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
