"""`python -m tests.gpu.imaginary`: what needs neither values nor a clock, on the imaginary card. `make card` calls it.

First the tests of the imaginary card itself, then the suite for GPUs on tiny models. Checks that need what the card has
not are skipped there and say so.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from explorer.engine.imaginary.run import run_on
from explorer.errors import BadInput
from explorer.plan.card.cards import parse_card

ROOT = Path(__file__).resolve().parents[2]
CARD = "h100"
JUDGED = ("tests/engine/imaginary", "tests/plan/card/test_imaginary.py")
SUITE = ("memory", "limits", "verdicts", "streams", "kernels", "ranks", "forecasts")


def main() -> int:
    card = parse_card(CARD)
    try:
        tests = [str(ROOT / path) for path in JUDGED if (ROOT / path).exists()]
        ended = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, check=False).returncode
        suite = ["-m", "tests.gpu", "--tiny", "--out", str(ROOT / "card-report"), "--only", *SUITE]
        ended |= run_on(card, suite).returncode
    except BadInput as error:
        print(f"Nothing was judged: {error}")
        return 1
    print(f"On an imaginary {card.name}: {'a check failed' if ended else 'every check passed'}.")
    return int(bool(ended))


if __name__ == "__main__":
    sys.exit(main())
