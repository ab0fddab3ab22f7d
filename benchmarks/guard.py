"""The guard: every seeded fault found and named, and a hundred repeats of a lock with equal bytes.

python -m benchmarks.guard [REPEATS]: faults of tests/plan/guard/faulty_net.py, each against the clean net. Repeats run
in this process, and a tenth of them in processes with another hash seed, thread count and instruction set.
"""

from __future__ import annotations

import os
import subprocess
import sys

from msgspec.structs import replace

from explorer.cli.verbs.lock import in_one_line
from explorer.own_loop.guard import predicted_lock
from explorer.plan.guard.lock import dumps, loads
from explorer.plan.guard.moves import moves
from explorer.record.graph import ModelRef
from explorer.record.run import Ranks, RunSpec
from tests.plan.guard.faulty_net import FAULTS

NET = "tests/plan/guard/faulty_net.py"
GPT = {"n_layers": 2}
STEPS = {
    NET: RunSpec(model=ModelRef(target=NET)),
    "gpt": RunSpec(model=ModelRef(target="sample_models/gpt.py", arguments=GPT)),
    "unet": RunSpec(model=ModelRef(target="sample_models/unet.py", arguments={"batch": 2})),
    "gpt, 64 ranks": RunSpec(model=ModelRef(target="sample_models/gpt.py", arguments=GPT), ranks=Ranks(n_ranks=64)),
}
"""The lock of the last has collectives."""
OTHERWISE = [
    {"PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": threads, "ATEN_CPU_CAPABILITY": instructions}
    for seed, threads, instructions in ((1, "1", "default"), (2, "2", "avx2"), (3, "4", "default"))
]


def text_of(name: str) -> str:
    return dumps(predicted_lock(STEPS[name], "keep-all"))


def print_faults() -> None:
    clean, n_named = predicted_lock(STEPS[NET], "keep-all"), 0
    for fault, (kind, block) in FAULTS.items():
        lock = predicted_lock(RunSpec(model=ModelRef(target=NET, arguments={"fault": fault})), "keep-all")
        found = moves(clean, replace(lock, run=clean.run))
        is_named = any(move.kind == kind and (block in move.blocks or not block) for move in found)
        n_named += is_named
        print(f"  {'named' if is_named else 'MISSED'}  {fault}: {in_one_line(found)}", flush=True)
    print(f"seeded faults found and named: {n_named} of {len(FAULTS)}")


def print_repeats(n_repeats: int) -> None:
    for name in STEPS:
        text = text_of(name)
        n_equal = sum(text_of(name) == text for _ in range(n_repeats - 1)) + 1
        code = f"from benchmarks.guard import *; print(text_of({name!r}), end='')"
        others = [
            subprocess.run(
                [sys.executable, "-c", code], env={**os.environ, **OTHERWISE[i % 3]}, capture_output=True, text=True
            ).stdout
            for i in range(max(1, n_repeats // 10))
        ]
        n_others = sum(other == text for other in others)
        n_collectives = sum(calls.n for calls in loads(text).step.collectives.values())
        print(
            f"{name}: {n_equal} of {n_repeats} repeats, {n_others} of {len(others)} processes, {len(text):,} bytes, "
            f"{n_collectives} collectives",
            flush=True,
        )


if __name__ == "__main__":
    print_faults()
    print_repeats(int(sys.argv[1]) if sys.argv[1:] else 100)
