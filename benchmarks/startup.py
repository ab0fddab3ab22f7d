"""How fast the command line answers: `python -m explorer --help` over an empty interpreter, over the library that it is
written with, and over another checkout.

Rounds alternate, so that a machine that slows down slows all of them; the ratio is that of the medians.

    python -m benchmarks.startup [OTHER CHECKOUT]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HELP = ("-m", "explorer", "--help")
ROUNDS = 15


def main(other: str = "") -> None:
    kinds = {name: (ROOT, ("-c", name)) for name in ("pass", "import typer")} | {"--help": (ROOT, HELP)}
    if other:
        kinds["--help there"] = (Path(other), HELP)
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for round_ in range(ROUNDS + 1):
        for name, (folder, arguments) in kinds.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            if round_:  # the first one compiles the modules
                taken[name].append(1000 * (time.perf_counter() - began))
    ours = statistics.median(taken["--help"])
    for name, times in taken.items():
        middle = statistics.median(times)
        print(f"{name:20} {middle:6.0f} ms ({min(times):.0f} to {max(times):.0f}), --help over it {ours / middle:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
