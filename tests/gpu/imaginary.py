"""`python -m tests.gpu.imaginary`: what needs neither values nor a clock, on the imaginary card. `make card` calls it.

The suite for GPUs, whole steps of `--card` and the other tests of the imaginary card run side by side, on two cores in
less than six minutes. Checks that need what the card has not are skipped and say so. No outcome depends on the speed of
the machine: limits of time end only what hangs.

Exit status 0: every check passed; 1: a check failed; 3: nothing was judged, because torch's CUDA build or a C compiler
is missing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from explorer.engine.imaginary.run import environment, run_on
from explorer.errors import BadInput
from explorer.plan.card.cards import parse_card

ROOT = Path(__file__).resolve().parents[2]
CARD = "h100"
STEPS = "tests/engine/imaginary/test_steps.py"
OTHERS = ("tests/engine/imaginary", "tests/plan/card/test_imaginary.py", "tests/own_loop/test_on_card.py")
SUITE = ("memory", "limits", "verdicts", "streams", "kernels", "ranks", "forecasts", "page")
PATIENCE = 10
"""By what limits of time are multiplied: a core may be shared with other work."""
TEST_LIMIT_S = 1200
NOTHING_JUDGED = 3


def main() -> int:
    card = parse_card(CARD)
    suite = ["-m", "tests.gpu", "--tiny", "--out", str(ROOT / "card-report")]
    suite += ["--patience", str(PATIENCE), "--only", *SUITE]
    pytest = [sys.executable, "-m", "pytest", "-q", f"--timeout={TEST_LIMIT_S}", "--durations=5"]
    try:
        environment(card)  # builds the stubs, once for all
        tests = [
            subprocess.Popen([*pytest, STEPS], cwd=ROOT),
            subprocess.Popen([*pytest, *OTHERS, f"--ignore={STEPS}"], cwd=ROOT),
        ]
        ended = [run_on(card, suite).returncode, *(test.wait() for test in tests)]
    except BadInput as error:
        print(f"Nothing was judged: {error}")
        return NOTHING_JUDGED
    print(f"On an imaginary {card.name}: {'a check failed' if any(ended) else 'every check passed'}.")
    return int(any(ended))


if __name__ == "__main__":
    sys.exit(main())
