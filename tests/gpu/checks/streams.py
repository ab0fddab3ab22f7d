"""Streams other than the default one, and offload: equal gradients, delayed frees, bytes on the host, bandwidth."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from explorer.engine.device.allocator import CudaRecorder, lifetimes, peak_bytes
from explorer.engine.model.describe import describe
from explorer.record import Policy, Unit
from tests.gpu.kit import Bench, gradients_of_both


class OnItsOwnStream(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.stream = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            out = nn.functional.dropout(self.linear(x), 0.1)
        torch.cuda.current_stream().wait_stream(self.stream)
        out.record_stream(torch.cuda.current_stream())
        return out


def check_blocks_on_streams_of_their_own(bench: Bench) -> None:
    bench.needs_values()
    bench.needs_cuda()

    def build() -> tuple[nn.Module, Tensor]:
        model = nn.Sequential(*(OnItsOwnStream(256) for _ in range(4))).to(bench.torch)
        return model, torch.randn(64, 256, device=bench.torch)

    both = gradients_of_both(build, Policy.recompute(["0", "1", "2", "3"]))
    bench.expect(all(map(torch.equal, *both)), "gradients of blocks on their own streams differ")


def check_frees_that_another_stream_delays(bench: Bench) -> None:
    bench.needs_cuda()
    side = torch.cuda.Stream()
    with CudaRecorder(bench.torch) as recorder:
        for _ in range(20):
            block = torch.empty(2**20, device=bench.torch)
            with torch.cuda.stream(side):
                block.mul_(2)
            block.record_stream(side)
            del block
        torch.cuda.synchronize()
        torch.empty(2**20, device=bench.torch)
    log = recorder.log
    bench.figure("most bytes waiting", peak_bytes(log, 0) / 2**20, "MiB")
    bench.expect(peak_bytes(log, log.base_bytes) == log.requested_peak_bytes, "the peak of delayed frees is off")
    bench.expect(log.is_complete and len(lifetimes(log).born) >= 21, "events are missing")


def offloading(bench: Bench, sample: str) -> Policy:
    graph = describe(bench.model(sample), device=bench.device)
    return Policy(units=tuple(Unit(blocks=(fqn,), action="offload") for fqn in graph.repeats))


def check_peak_time_and_host_bytes(bench: Bench) -> None:
    for sample in bench.samples("gpt", "mlp"):
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
    bench.needs_values()

    def build() -> tuple[nn.Module, torch.Tensor]:
        layers = (nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))
        return nn.Sequential(*layers).to(bench.torch), torch.randn(512, 256, device=bench.torch)

    policy = Policy(units=tuple(Unit(blocks=(str(i),), action="offload") for i in range(8)))
    bench.expect(all(map(torch.equal, *gradients_of_both(build, policy))), "gradients of offloaded blocks differ")


def check_bandwidth(bench: Bench) -> None:
    bench.needs_clock()
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
