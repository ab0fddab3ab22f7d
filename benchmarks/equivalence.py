"""What the full equivalence report costs over the quick one: CPU time on the sample GPT, as a ratio.

    python -m benchmarks.equivalence [TARGET]        default sample_models/gpt.py

Goal: at most 3. Both forms measure the same pair first; the full one adds a rerun, float64, further steps and masks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from sys import path

path.insert(0, str(Path(__file__).resolve().parents[1]))

from msgspec.structs import replace  # noqa: E402

from explorer.engine.compare.compare import compare  # noqa: E402
from explorer.engine.model.describe import describe  # noqa: E402
from explorer.record.graph import ModelRef  # noqa: E402
from explorer.record.policy import Policy  # noqa: E402
from explorer.record.run import RunSpec  # noqa: E402

N_ROUNDS = 3


def main() -> None:
    """Prints one JSON line: the median ratio and the seconds behind it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", default="sample_models/gpt.py")
    model = ModelRef(target=parser.parse_args().target)
    baseline = RunSpec(model=model)
    candidate = replace(baseline, policy=Policy.recompute(describe(model).repeats))
    compare(baseline, candidate, full=False)  # imports and first calls
    seconds: dict[bool, list[float]] = {False: [], True: []}
    verdicts = set()
    for _ in range(N_ROUNDS):
        for full in (False, True):
            start = time.process_time()
            verdicts.add(compare(baseline, candidate, full=full).verdict)
            seconds[full].append(time.process_time() - start)
    ratios = [whole / quick for whole, quick in zip(seconds[True], seconds[False])]
    figures = {
        "benchmark": "equivalence",
        "full_over_quick_ratio": round(statistics.median(ratios), 2),
        "goal_ratio": 3.0,
        "quick_s": round(statistics.median(seconds[False]), 2),
        "full_s": round(statistics.median(seconds[True]), 2),
        "verdicts": sorted(verdicts),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
