"""Equality: generators of every kind put back, bitwise with deterministic kernels, and the floor without."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from explorer.engine.model.describe import describe
from explorer.plan.policy.presets import preset
from explorer.record import Policy
from tests.gpu.kit import Bench, gradients_of_both


class Drawing(nn.Module):
    """Draws on the GPU, on the CPU, and from a generator of its own; takes its input by keyword."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.own = torch.Generator(device).manual_seed(7)

    def forward(self, *, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.linear(x), 0.3)
        x = x * (torch.rand(x.shape[-1]) > 0.2).to(x.device)
        return x * torch.rand(x.shape, device=x.device, generator=self.own).round()


class Chain(nn.Module):
    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Drawing(width, device) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x) + x
        return x


def check_generators_are_put_back(bench: Bench) -> None:
    def build() -> tuple[nn.Module, Tensor]:
        return Chain(32, bench.torch).to(bench.torch), torch.randn(16, 32, device=bench.torch)

    blocks = [f"blocks.{i}" for i in range(4)]
    policy = Policy.recompute(blocks, restore_rng=tuple(f"{block}.own" for block in blocks))
    equal = [torch.equal(one, other) for one, other in zip(*gradients_of_both(build, policy), strict=True)]
    bench.figure("gradients equal bit by bit", sum(equal), f"of {len(equal)}")
    bench.expect(all(equal), "dropout, CPU draws, keyword inputs or own generators were drawn anew")


def check_verdicts_of_the_sample_models(bench: Bench) -> None:
    for sample in bench.samples():
        spec = bench.spec(sample)
        policy = preset("all", describe(spec.model, device=bench.device))
        comparison = bench.compared(spec, policy)
        bench.figure(sample, comparison.verdict)
        bench.expect(
            comparison.failure is None, f"{sample}: {comparison.failure.sentence if comparison.failure else ''}"
        )
        bench.expect(
            comparison.verdict in ("bitwise equal", "rounding"),
            f"{sample}: {comparison.verdict}, {comparison.moved_twice}",
        )
        if comparison.no_reference_because:
            bench.figure(f"{sample} without a reference", comparison.no_reference_because)


def check_noise_floor_without_deterministic_kernels(bench: Bench) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(64, 32).to(bench.torch)
    ids = torch.randint(0, 64, (4096,), device=bench.torch)
    weight = torch.randn(4096, 32, device=bench.torch)
    twice = []
    for _ in range(2):
        table.zero_grad()
        (table(ids) * weight).sum().backward()
        assert table.weight.grad is not None
        twice.append(table.weight.grad.clone())
    bench.figure("largest difference of two equal runs", float((twice[0] - twice[1]).abs().max()))
