"""How long a million events take to thin, draw and send: medians and ratios, never a test.

python -m benchmarks.thinning
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from explorer.plan.memory.ledger import array_of, held
from explorer.plan.predict.forecaster import Forecaster, prices
from explorer.record import (
    ROLES,
    Allocations,
    Calls,
    Environment,
    MeasuredBlock,
    Measurement,
    ModelRef,
    PhaseSpan,
    Policy,
    RunSpec,
)
from explorer.record.base import column
from explorer.view.drawing.axis import MAX_POINTS, minmax
from explorer.view.memory.stacked import roles
from explorer.view.memory.timeline import timeline

N_EVENTS = 1_000_000
N_BLOCKS = 200


def main() -> None:
    line = np.cumsum(np.random.default_rng(0).integers(-(2**20), 2**20, N_EVENTS))
    kept = minmax(line)
    lost = sum(
        int(shaken.argmax()) not in minmax(shaken)
        for shaken in (np.random.default_rng(seed).integers(0, 2**40, 50_000) for seed in range(200))
    )
    run = step(N_EVENTS // 2)
    log = run.allocations
    assert log is not None and len(held(log)) == N_EVENTS + 1
    small = step(50_000)
    blocks = [f"layers.{i}" for i in range(N_BLOCKS)]
    forecaster, half = Forecaster(small), Policy.recompute(blocks[::2])
    dozen, twelve = Forecaster(step(3_000, 12)), Policy.recompute(blocks[:12])
    figures: dict[str, Any] = {
        f"thin {N_EVENTS:,} points to {len(kept):,} (ms)": median_ms(lambda: minmax(line)),
        f"peaks lost in 200 lines thinned to {MAX_POINTS:,}": lost,
        f"held bytes of {N_EVENTS:,} events (ms)": median_ms(lambda: held(log)),
        f"timeline figure of {N_EVENTS:,} events (ms)": median_ms(lambda: timeline(run).figure, n=5),
        f"roles figure of {N_EVENTS:,} events (ms)": median_ms(lambda: roles(run).figure, n=5),
        "timeline figure as JSON (KiB)": round(len(timeline(run).figure.to_json()) / 1024),
        "roles figure as JSON (KiB)": round(len(roles(run).figure.to_json()) / 1024),
        f"forecast of {N_BLOCKS // 2} of {N_BLOCKS} blocks, warm (CPU ms, least)": least_cpu_ms(
            lambda: forecaster.forecast(half)
        ),
        "its peak alone, as a planner asks (CPU ms, least)": least_cpu_ms(lambda: forecaster.peak_bytes(half)),
        "forecast of 12 of 12 blocks, warm (CPU ms, least)": least_cpu_ms(lambda: dozen.forecast(twelve)),
        f"prices of {N_BLOCKS} blocks, {len(small.allocations.n_bytes):,} allocations (ms)": median_ms(
            lambda: prices(small, blocks), n=5
        ),
    }  # fmt: skip
    print(json.dumps(figures, indent=2))


def median_ms(work: Callable[[], object], n: int = 15) -> float:
    return round(statistics.median(readings_ms(work, n, time.perf_counter_ns)), 2)


def least_cpu_ms(work: Callable[[], object], n: int = 25) -> float:
    """Least of `n`: what others do on the machine only ever adds."""
    return round(min(readings_ms(work, n, time.process_time_ns)), 2)


def readings_ms(work: Callable[[], object], n: int, clock_ns: Callable[[], int]) -> list[float]:
    """Of `n` calls after one that is not clocked."""
    work()
    readings = []
    for _ in range(n):
        start = clock_ns()
        work()
        readings.append((clock_ns() - start) / 1e6)
    return readings


def step(n_allocations: int, n_blocks: int = N_BLOCKS) -> Measurement:
    """A chain of blocks that saves `n_allocations` tensors in forward and frees them in reverse."""
    sizes = np.random.default_rng(0).integers(2**10, 2**20, n_allocations)
    born = np.arange(1, n_allocations + 1)
    n_ticks = 2 * n_allocations
    borders = [-(-i * n_allocations // n_blocks) for i in range(n_blocks + 1)]
    log = Allocations(
        n_ticks=n_ticks,
        n_bytes=column(sizes.tolist()),
        born=column(born.tolist()),
        died=column((n_ticks + 1 - born).tolist()),
        role=column([ROLES.index("saved activation")] * n_allocations),
        block=column((np.arange(n_allocations) * n_blocks // n_allocations).tolist()),
        op=column([0] * n_allocations),
        blocks=tuple(f"layers.{i}" for i in range(n_blocks)),
        ops=("aten.mm.default",),
        time_ns=column(range(n_ticks + 1)),
        calls=Calls(
            block=column(range(n_blocks)),
            first_tick=column(borders[:-1]),
            end_tick=column(borders[1:]),
            n_inputs=column([0] * n_blocks),
            n_outputs=column([1] * n_blocks),
            entries=column(border - 1 for border in borders[1:]),
        ),
    )
    assert int(array_of(log.died).min()) > n_allocations
    costs = tuple(
        MeasuredBlock(
            fqn=fqn, n_forward=1, n_recompute=0, saved_after_forward_bytes=1, at_peak_bytes=1, forward_flops=1,
            recompute_flops=0, backward_flops=2,
        )
        for fqn in ("", *log.blocks)
    )  # fmt: skip
    return Measurement(
        spec=RunSpec(model=ModelRef(target="benchmark")),
        environment=Environment(
            device="cpu", device_name="", torch_version="", python_version="", platform="", n_threads=1
        ),
        allocations=log,
        phases=(
            PhaseSpan(phase="forward", block="", first_tick=1, end_tick=n_allocations + 1),
            PhaseSpan(phase="backward", block="", first_tick=n_allocations + 1, end_tick=n_ticks + 1),
        ),
        blocks=costs,
    )


if __name__ == "__main__":
    main()
