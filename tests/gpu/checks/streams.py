"""Streams other than the default one: blocks that run in one, and frees that another one delays."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from explorer.engine.device.allocator import lifetimes, peak_bytes
from explorer.engine.device.cuda_allocator import CudaRecorder
from explorer.record import Policy
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
    assert log.base_bytes is not None
    bench.figure("most bytes waiting", peak_bytes(log, 0) / 2**20, "MiB")
    bench.expect(peak_bytes(log, log.base_bytes) == log.requested_peak_bytes, "the peak of delayed frees is off")
    bench.expect(log.is_complete and len(lifetimes(log).born) >= 21, "events are missing")
