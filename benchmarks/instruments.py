"""What watching costs: CPU time of one step under each instrument, as a ratio to the same step unwatched.

The four kinds of step take turns, so that a slow minute hits all alike. Reading the recording out afterwards is shown
apart: it happens after the step.

    python -m benchmarks.instruments [sample_models/gpt.py] [rounds]

A watcher costs most where kernels are small. Three models of 200 small blocks are therefore factories of this file:

    python -m benchmarks.instruments benchmarks/instruments.py:gpt_200      # or blocks_64, blocks_16
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from explorer.engine.bench.attribution import attribute
from explorer.engine.bench.recording import tracker_of
from explorer.engine.bench.step import Trainee, prepare, run_step
from explorer.engine.device.allocator import clock_skew_ns
from explorer.engine.device.device import device_of
from explorer.engine.state.global_state import preserve_global_state
from explorer.record import ModelRef, Policy, RunSpec
from sample_models import gpt

BUDGET = {"allocator": 1.15, "tracker": 1.3, "both": None}


class SmallBlock(nn.Module):
    """Norm, two layers and an activation between them, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.GELU()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def blocks_64(width: int = 64) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(SmallBlock(width) for _ in range(200))), torch.randn(8, width)


def blocks_16() -> tuple[nn.Module, torch.Tensor]:
    return blocks_64(16)


def gpt_200() -> tuple[nn.Module, Any, object]:
    return gpt.build(n_layers=200, width=32, n_heads=4, length=32, batch=2, vocabulary=128, dropout=0.1)


def main(target: str = "sample_models/gpt.py", rounds: str = "15") -> None:
    spec = RunSpec(model=ModelRef(target=target))
    with preserve_global_state():
        plain = prepare(spec)
        blocks = [fqn for fqn, module in plain.model.named_modules() if fqn.rpartition(".")[2].isdigit()]
        outermost = [fqn for fqn in blocks if not any(fqn.startswith(f"{other}.") for other in blocks)]
        again = prepare(RunSpec(model=spec.model, policy=Policy.recompute(outermost)))
        print(
            f"{target}, CPU time with {spec.n_threads} thread, ratio to the unwatched step, {rounds} rounds in turns\n"
        )
        print(f"{'policy':14} {'instrument':10} {'median':>7} {'spread':>7} {'budget':>7} {'read out':>9}")
        for name, trainee in (("keep all", plain), ("recompute all", again)):
            table(name, trainee, int(rounds))


def table(policy: str, trainee: Trainee, rounds: int) -> None:
    steps: dict[str, Callable[[Trainee], tuple[float, float]]] = {
        "unwatched": unwatched,
        "allocator": under_allocator,
        "tracker": under_tracker,
        "both": under_both,
    }
    for step in steps.values():
        step(trainee)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            took[name].append(step(trainee))
    for name in ("allocator", "tracker", "both"):
        ratios = [watched[0] / bare[0] for watched, bare in zip(took[name], took["unwatched"])]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        budget = BUDGET[name]
        read_ms = statistics.median(read for _, read in took[name]) * 1e3
        limit = f"{budget:7.2f}" if budget else f"{'-':>7}"
        print(f"{policy:14} {name:10} {middle:7.3f} {(high - low) / 2:7.3f} {limit} {read_ms:6.0f} ms")


def timed(step: Callable[[], object]) -> float:
    first = time.process_time()
    step()
    return time.process_time() - first


def unwatched(trainee: Trainee) -> tuple[float, float]:
    trainee.model.zero_grad(set_to_none=True)
    return timed(lambda: run_step(trainee)), 0.0


def under_allocator(trainee: Trainee) -> tuple[float, float]:
    trainee.model.zero_grad(set_to_none=True)
    with device_of(trainee.device).recorder():
        took = timed(lambda: run_step(trainee))
        first = time.process_time()
    return took, time.process_time() - first


def under_tracker(trainee: Trainee) -> tuple[float, float]:
    trainee.model.zero_grad(set_to_none=True)
    with tracker_of(trainee) as tracker:
        took = timed(lambda: run_step(trainee, tracker.on_phase))
    return took, 0.0


def under_both(trainee: Trainee) -> tuple[float, float]:
    trainee.model.zero_grad(set_to_none=True)
    recorder, tracker = device_of(trainee.device).recorder(), tracker_of(trainee)
    with recorder, tracker:
        took = timed(lambda: run_step(trainee, tracker.on_phase))
        first = time.process_time()
    attribute(recorder.log, tracker, clock_skew_ns(recorder.log, ()))
    return took, time.process_time() - first


if __name__ == "__main__":
    main(*sys.argv[1:])
