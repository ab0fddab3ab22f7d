"""Time: the allocator's clock against Python's, CUDA events against the wall, and what watching costs."""

from __future__ import annotations

import statistics
import time

import torch

from explorer.engine.bench.bench import bench_of
from explorer.engine.bench.recording import tracker_of
from explorer.engine.bench.step import Trainee, prepare, run_step
from explorer.engine.device.allocator import clock_skew_ns, take_probe
from explorer.engine.device.device import device_of
from explorer.engine.state.global_state import preserve_global_state
from tests.gpu.kit import Bench

N_STEPS = 10


def warm(bench: Bench, sample: str, size: str = "small") -> Trainee:
    trainee = prepare(bench.spec(sample, size))
    for _ in range(3):
        run_step(trainee)
    return trainee


def wall_ms(bench: Bench, trainee: Trainee) -> float:
    bench.settle()
    began = time.perf_counter()
    run_step(trainee)
    bench.settle()
    return (time.perf_counter() - began) * 1e3


def check_clock_skew(bench: Bench) -> None:
    bench.needs_clock()
    skews = []
    for _ in range(5):
        with device_of(bench.torch).recorder() as recorder:
            probes = [take_probe(bench.torch, number=i) for i in range(4)]
        skews.append(clock_skew_ns(recorder.log, probes))
    bench.figure("history minus Python, median", statistics.median(skews), "ns")
    bench.figure("range over five recordings", max(skews) - min(skews), "ns")
    bench.expect(abs(statistics.median(skews)) < 5_000_000, f"the clocks are {skews} ns apart")


def check_events_against_the_wall(bench: Bench) -> None:
    bench.needs_clock()
    with preserve_global_state():
        for sample, size in (("gpt", "small"), ("gpt", "gpu"), ("resnet", "gpu")):
            trainee = warm(bench, sample, size)
            timed = bench_of(trainee, device_of(bench.torch))
            events = statistics.median(timed.time()["step"] for _ in range(N_STEPS))
            wall = statistics.median(wall_ms(bench, trainee) for _ in range(N_STEPS))
            bench.figure(f"{sample} {size} events over wall", events / wall)
            if bench.device == "cuda":
                bench.expect(
                    0.5 < events / wall < 1.1, f"{sample} {size}: {events:.2f} ms of events, {wall:.2f} of wall"
                )
                bench.figure(f"{sample} {size} GPU busy", 100 * busy_ms(trainee) / events, "% of the events' time")


def busy_ms(trainee: Trainee) -> float:
    """Kernels of one step, added up: what is missing to the events' time is a GPU that waits for Python."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run_step(trainee)
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in profile.key_averages()) / 1e3


def check_instrumented_over_bare(bench: Bench) -> None:
    bench.needs_clock()
    with preserve_global_state():
        for size in ("small", "gpu"):
            trainee, device = warm(bench, "gpt", size), device_of(bench.torch)
            bare, watched = [], []
            for _ in range(5):
                bare.append(wall_ms(bench, trainee))
                trainee.model.zero_grad(set_to_none=True)
                bench.settle()
                began = time.perf_counter()
                tracker = tracker_of(trainee)
                with device.recorder(), tracker:
                    run_step(trainee, tracker.on_phase)
                    bench.settle()
                watched.append((time.perf_counter() - began) * 1e3)
            bench.figure(f"gpt {size} watched over bare", statistics.median(watched) / statistics.median(bare))
