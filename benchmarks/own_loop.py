"""What a recorder in a user's own loop costs: CPU time of a recorded step and of the steps beside it, as ratios.

One loop runs bare and one under `explorer.watch`, which records each third step; their steps take turns, so that a slow
minute hits both alike. What happens between two steps, beginning and building the record, is shown apart.

    python -m benchmarks.own_loop [sample_models/gpt.py] [rounds]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

import explorer
from explorer.engine.bench.user_loop import LoopRecording
from explorer.engine.model.load import load
from explorer.record import ModelRef

BUDGET = {"recorded": 1.25, "beside": 1.0}


def main(target: str = "sample_models/gpt.py", rounds: str = "12") -> None:
    torch.set_num_threads(1)
    bare, watched = loop(target), loop(target)
    for step in (bare, watched):
        step[1]()
    n = int(rounds)
    watch = explorer.watch(watched[0], watched[2], at=range(2, 3 * n, 3))
    apart: dict[str, list[float]] = {"__enter__": [], "__exit__": []}
    for name in apart:
        setattr(LoopRecording, name, clocked(getattr(LoopRecording, name), apart[name]))
    ratios: dict[str, list[float]] = {"recorded": [], "beside": []}
    for i in range(1, 3 * n):
        n_clocked = [len(took_s) for took_s in apart.values()]
        alone, under = seconds(bare[1]), seconds(watched[1])
        between = sum(sum(took_s[n:]) for took_s, n in zip(apart.values(), n_clocked))
        ratios["recorded" if i in watch.runs else "beside"].append((under - between) / alone)
    watch.close()
    print(f"{target}, CPU time with 1 thread, ratio to the same step of a bare loop, in turns\n")
    for name, series in ratios.items():
        low, middle, high = statistics.quantiles(series, n=4, method="inclusive")
        print(f"{name:10} x{middle:.3f} +- {(high - low) / 2:.3f}   budget x{BUDGET[name]:.2f}   {len(series)} steps")
    for name, took_s in zip(("begin", "record"), apart.values()):
        print(f"{name:10} {statistics.median(took_s):.3f} s between two steps, for each recorded one")


def clocked(function: Callable[..., None], took: list[float]) -> Callable[..., None]:
    """`function`, which adds the CPU time of each call to `took`."""

    def call(*args: object) -> None:
        began = time.process_time()
        function(*args)
        took.append(time.process_time() - began)

    return call


def loop(target: str) -> tuple[torch.nn.Module, Callable[[], None], torch.optim.Optimizer]:
    """A training loop's step over a sample model."""
    loaded = load(ModelRef(target=target))
    optimizer = torch.optim.AdamW(loaded.model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loaded.loss(loaded.output()).backward()
        optimizer.step()

    return loaded.model, step, optimizer


def seconds(step: Callable[[], None]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


if __name__ == "__main__":
    main(*sys.argv[1:])
