"""Kernels a library chooses: compiled blocks, the three attentions, cuDNN's search for the fastest."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from explorer import apply_policy
from explorer.engine.device.device import device_of
from explorer.engine.model.describe import describe
from explorer.plan.policy.presets import preset
from explorer.record import Policy
from tests.gpu.kit import Bench, Skipped


def check_compiled_blocks(bench: Bench) -> None:
    bench.needs_values()
    if bench.device == "cpu":
        raise Skipped("compiled blocks on a CPU are tested elsewhere")
    gradients = []
    for policed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(3))).to(bench.torch)
        for block in model:
            block.compile()
        if policed:
            apply_policy(model, Policy.recompute(["0", "1", "2"]))
        x = torch.randn(32, 128, device=bench.torch)
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    bench.expect(all(map(torch.equal, *gradients)), "gradients of compiled blocks differ under a policy")


class Attention(nn.Module):
    def __init__(self, kind: SDPBackend) -> None:
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.kind):
            out = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return x + out.transpose(1, 2).flatten(2)


def check_attentions(bench: Bench) -> None:
    kinds = {"math": SDPBackend.MATH}
    if bench.device == "cuda":
        kinds |= {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    for name, kind in kinds.items():
        gradients, peaks = [], []
        for policed in (False, True):
            torch.manual_seed(0)
            dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
            model = nn.Sequential(*(Attention(kind) for _ in range(3))).to(bench.torch, dtype)
            if policed:
                apply_policy(model, Policy.recompute(["0", "1", "2"]))
            x = torch.randn(4, 8 if bench.tiny else 512, 64, device=bench.torch, dtype=dtype)
            with device_of(bench.torch).recorder() as recorder:
                model(x).square().mean().backward()
            peaks.append(recorder.log.requested_peak_bytes or 0)
            gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        equal = all(map(torch.equal, *gradients))
        bench.figure(f"{name} bitwise", "yes" if equal else "no")
        if bench.device == "cuda":
            bench.figure(f"{name} peak, recomputed over kept", peaks[1] / peaks[0])
        if not equal:  # fused backward adds up with atomics unless it is told not to: rounding, never another mask
            far = max(float((a - b).float().norm() / a.float().norm()) for a, b in zip(*gradients))
            bench.expect(far < 2e-2, f"{name}: gradients lie {far:.1e} apart")


def check_cudnn_benchmark(bench: Bench) -> None:
    bench.needs_values()
    before = torch.backends.cudnn.benchmark
    for on in (False, True):
        torch.backends.cudnn.benchmark = on
        try:
            spec = bench.spec("resnet")
            policy = preset("all", describe(spec.model, device=bench.device))
            comparison = bench.compared(spec, policy)
        finally:
            torch.backends.cudnn.benchmark = before
        bench.figure("benchmark on" if on else "benchmark off", comparison.verdict)
        peak = comparison.candidate.step_peak_bytes
        bench.figure(
            "peak, watched minus alone", (peak or 0) - (comparison.candidate.peaks.alone_peak_bytes or 0), "bytes"
        )
        bench.expect(comparison.verdict in ("bitwise equal", "rounding"), f"benchmark {on}: {comparison.verdict}")
