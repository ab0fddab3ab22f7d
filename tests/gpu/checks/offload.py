"""Offload: every gradient the same, the bytes on the host, the bandwidth of the bus, and what overlaps."""

from __future__ import annotations

import time

import torch

from explorer import apply_policy
from explorer.engine.model.describe import describe
from explorer.record import Policy, Unit
from tests.gpu.kit import Bench


def offloading(bench: Bench, sample: str) -> Policy:
    graph = describe(bench.model(sample), device=bench.device)
    return Policy(units=tuple(Unit(blocks=(fqn,), action="offload") for fqn in graph.repeats))


def check_peak_time_and_host_bytes(bench: Bench) -> None:
    for sample in ("gpt", "mlp"):
        spec, policy = bench.spec(sample, "gpu", n_repeats=3), offloading(bench, sample)
        kept, moved = bench.measured(spec), bench.measured(spec, policy)
        bench.figure(f"{sample} peak over kept", (moved.step_peak_bytes or 0) / (kept.step_peak_bytes or 1))
        bench.figure(f"{sample} on the host", (moved.peaks.offloaded_peak_bytes or 0) / 2**20, "MiB")
        times = [run.times.step.median_ms if run.times else None for run in (kept, moved)]
        if times[0] and times[1]:
            bench.figure(f"{sample} time over kept", times[1] / times[0])
        bench.expect(kept.loss == moved.loss, f"{sample}: losses {kept.loss} and {moved.loss}")
        if bench.device == "cuda":
            bench.expect((moved.step_peak_bytes or 0) < (kept.step_peak_bytes or 0), f"{sample}: nothing was freed")


def check_gradients(bench: Bench) -> None:
    gradients = []
    for policed in (False, True):
        torch.manual_seed(0)
        layers = (torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(8))
        model = torch.nn.Sequential(*layers).to(bench.torch)
        if policed:
            apply_policy(model, Policy(units=tuple(Unit(blocks=(str(i),), action="offload") for i in range(8))))
        model(torch.randn(512, 256, device=bench.torch)).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    bench.expect(all(map(torch.equal, *gradients)), "gradients of offloaded blocks differ")


def check_bandwidth(bench: Bench) -> None:
    bench.needs_cuda()
    there = torch.empty(2**28, dtype=torch.uint8, device=bench.torch)
    here = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    for name, to, of in (("to the host", here, there), ("to the GPU", there, here)):
        to.copy_(of, non_blocking=True)
        bench.settle()
        began = time.perf_counter()
        for _ in range(4):
            to.copy_(of, non_blocking=True)
        bench.settle()
        bench.figure(name, 4 * 2**28 / (time.perf_counter() - began) / 2**30, "GiB/s")
