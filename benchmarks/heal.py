"""Trainings of 1,000 steps under a limit of memory that refuses some of their batches: `python -m benchmarks heal`.

Each of five loops runs twice from one state: without a limit, and with `watch(on_oom="heal")` under a limit that later,
larger batches exceed. Weights, statistics and optimizer state must be bitwise equal at the end. A loop runs in a
process of its own, because a limit counts what earlier work has left in the heap.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time

import torch
from torch import Tensor

import explorer
from explorer.engine.device.memory_limit import process_memory_limit
from explorer.own_loop.watch import Watch
from tests.own_loop.test_heal import LOOPS, Net, batch

WIDTH, FIRST = 256, 128
LIMIT_MIB = dict.fromkeys(LOOPS, 10) | {"autocast": 6}
GROWTH, STAGES = 1.3, 8
"""Batches grow by this factor, at equal distances."""


def train(name: str, n_steps: int, limit_bytes: int | None) -> tuple[list[Tensor], Watch | None, float]:
    loop, kind = LOOPS[name]
    if name == "autocast":  # oneDNN crashes in bfloat16 after a refusal (torch 2.13), also without a watch
        torch.backends.mkldnn.set_flags(_enabled=False)
    torch.manual_seed(0)
    random.seed(0)
    model = Net(kind, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    per_step = 3 if name == "accumulating" else 1
    steps = loop(model, optimizer, lambda i: batch(i, int(FIRST * GROWTH ** (STAGES * i // (n_steps * per_step)))))
    watch = None if limit_bytes is None else explorer.watch(model, optimizer, on_oom="heal")
    start = time.process_time()
    for step in range(n_steps):
        if watch is not None and step == 2:
            with process_memory_limit(limit_bytes):
                for _ in range(step, n_steps):
                    next(steps)
            break
        next(steps)
    if watch is not None:
        watch.close()
    moments = [value for each in optimizer.state.values() for value in each.values()]
    return [*model.state_dict().values(), *moments, torch.get_rng_state()], watch, time.process_time() - start


def one(name: str, n_steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        state, watch, healed = train(name, n_steps, LIMIT_MIB[name] * 2**20)  # first: holes of the heap do not count
        reference, _, bare = train(name, n_steps, None)
        assert watch is not None
        equal = len(state) == len(reference) and all(map(torch.equal, state, reference))
        events = ", ".join(f"{event.step} {event.phase}" for event in watch.healed)
        again = sum(event.seconds for event in watch.healed)
        print(
            f"{name:13} {n_steps} steps, {len(watch.healed)} refusals healed ({events}), bitwise equal: {equal}, "
            f"CPU {healed / bare:.2f} of the bare loop, {again:.1f} s in second runs, {len(list(os.scandir()))} files"
        )
        os.chdir("/")
    sys.exit(not equal)


def main() -> None:
    if len(sys.argv) > 2:
        one(sys.argv[1], int(sys.argv[2]))
    codes = [subprocess.run([sys.executable, "-m", "benchmarks.heal", name, "1000"], check=False) for name in LOOPS]
    sys.exit(max(code.returncode for code in codes))


if __name__ == "__main__":
    main()
