"""`python -m benchmarks [NAME ...]` runs every benchmark, or those named, one process each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    known = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))
    asked = sys.argv[1:] or known
    if unknown := sorted(set(asked) - set(known)):
        sys.exit(f"No benchmark {', '.join(unknown)}; there are {', '.join(known)}.")
    codes = []
    for name in asked:
        print(f"== {name}", flush=True)
        codes.append(
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=HERE.parent, check=False).returncode
        )
    sys.exit(max(codes, default=0))


if __name__ == "__main__":
    main()
