"""The guard: every seeded fault found and named, and a hundred repeats of a lock with equal bytes.

python -m benchmarks.guard [REPEATS]: faults of tests/plan/guard/faulty_net.py, each against the clean net. Repeats run
in this process, and a tenth of them in processes with another hash seed, thread count and instruction set.
"""

from __future__ import annotations

import os
import subprocess
import sys

from msgspec.structs import replace

from explorer.own_loop.guard import predicted_lock
from explorer.plan.guard.lock import dumps
from explorer.plan.guard.moves import in_one_line, moves
from explorer.record.graph import ModelRef
from explorer.record.lock import Lock
from explorer.record.run import RunSpec
from tests.plan.guard.faulty_net import FAULTS

NET = "tests/plan/guard/faulty_net.py"
MODELS = {NET: {}, "sample_models/gpt.py": {"n_layers": 2}, "sample_models/unet.py": {"batch": 2}}
OTHERWISE = [
    {"PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": threads, "ATEN_CPU_CAPABILITY": instructions}
    for seed, threads, instructions in ((1, "1", "default"), (2, "2", "avx2"), (3, "4", "default"))
]


def lock_of(model: str, **arguments: str | int) -> Lock:
    return predicted_lock(RunSpec(model=ModelRef(target=model, arguments=dict(arguments))), "keep-all")


def print_faults() -> None:
    clean, n_named = lock_of(NET), 0
    for fault, (kind, block) in FAULTS.items():
        found = moves(clean, replace(lock_of(NET, fault=fault), run=clean.run))
        is_named = any(move.kind == kind and (block in move.blocks or not block) for move in found)
        n_named += is_named
        print(f"  {'named' if is_named else 'MISSED'}  {fault}: {in_one_line(found)}", flush=True)
    print(f"seeded faults found and named: {n_named} of {len(FAULTS)}")


def print_repeats(n_repeats: int) -> None:
    for model, arguments in MODELS.items():
        text = dumps(lock_of(model, **arguments))
        n_equal = sum(dumps(lock_of(model, **arguments)) == text for _ in range(n_repeats - 1)) + 1
        code = f"from benchmarks.guard import *; print(dumps(lock_of({model!r}, **{arguments!r})), end='')"
        others = [
            subprocess.run(
                [sys.executable, "-c", code], env={**os.environ, **OTHERWISE[i % 3]}, capture_output=True, text=True
            ).stdout
            for i in range(max(1, n_repeats // 10))
        ]
        n_others = sum(other == text for other in others)
        print(f"{model}: {n_equal} of {n_repeats} repeats, {n_others} of {len(others)} processes, {len(text):,} bytes")


if __name__ == "__main__":
    print_faults()
    print_repeats(int(sys.argv[1]) if sys.argv[1:] else 100)
