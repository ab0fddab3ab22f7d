"""Equality: generators put back, number formats, the floor without deterministic kernels; and runs to take home."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn

from explorer import apply_policy
from explorer.engine.model.describe import describe
from explorer.engine.state.global_state import tf32_kinds, without_tf32
from explorer.plan.policy.presets import preset
from explorer.record import ModelRef, Policy
from explorer.record.base import to_msgpack
from tests.golden.make import TINY
from tests.gpu.kit import Bench, Skipped, gradients_of_both


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
    bench.needs_values()

    def build() -> tuple[nn.Module, Tensor]:
        return Chain(32, bench.torch).to(bench.torch), torch.randn(16, 32, device=bench.torch)

    blocks = [f"blocks.{i}" for i in range(4)]
    policy = Policy.recompute(blocks, restore_rng=tuple(f"{block}.own" for block in blocks))
    equal = [torch.equal(one, other) for one, other in zip(*gradients_of_both(build, policy), strict=True)]
    bench.figure("gradients equal bit by bit", sum(equal), f"of {len(equal)}")
    bench.expect(all(equal), "dropout, CPU draws, keyword inputs or own generators were drawn anew")


def check_verdicts_of_the_sample_models(bench: Bench) -> None:
    bench.needs_values()
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


NETS = ("plain", "dropout", "batch_norm", "counter", "cache", "in_place", "shared", "temperature", "global_scale")
NEEDS_VALUES = {"departs", "reads_late"}
"""Traits that a second run of a block shows by another result."""


def check_known_faults_are_those_of_the_cpu(bench: Bench) -> None:
    """What is known of each block before any run, of nets with a fault and of nets without one."""
    models = [ModelRef(target=f"tests/engine/trap_nets.py:{net}") for net in NETS]
    for model in [*models, bench.model("gpt")]:
        there, here = (describe(model, device=device).by_fqn for device in ("cpu", bench.device))
        bench.expect(there.keys() == here.keys(), f"{model.target}: other blocks")
        for fqn, block in here.items():
            known, seen = set(there[fqn].traits), set(block.traits)
            missed = known - seen - (NEEDS_VALUES if bench.is_imaginary else set())
            bench.expect(not missed and seen <= known, f"{model.target} {fqn}: {seen}, on the CPU {known}")


def check_noise_floor_without_deterministic_kernels(bench: Bench) -> None:
    bench.needs_values()
    torch.manual_seed(0)
    table = nn.Embedding(64, 32).to(bench.torch)
    ids = torch.randint(0, 64, (4096,), device=bench.torch)
    weight = torch.randn(4096, 32, device=bench.torch)
    twice = []
    for _ in range(2):
        table.zero_grad()
        (table(ids) * weight).sum().backward()
        twice.append(table.weight.grad.clone())
    bench.figure("largest difference of two equal runs", float((twice[0] - twice[1]).abs().max()))


def check_autocast(bench: Bench) -> None:
    bench.needs_values()
    for autocast in ("bfloat16", "float16"):
        if bench.device == "cpu" and autocast == "float16":
            continue
        spec = bench.spec("gpt", autocast=autocast)
        policy = preset("all", describe(spec.model, device=bench.device))
        comparison = bench.compared(spec, policy)
        bench.figure(autocast, comparison.verdict)
        bench.expect(comparison.verdict == "bitwise equal", f"{autocast}: {comparison.verdict}")


def check_loss_scaling(bench: Bench) -> None:
    """A training loop with torch's own scaler: gradients, scale and weights with a policy are those without."""
    bench.needs_values()
    if bench.device == "cpu":
        raise Skipped("float16 training needs a CUDA device")
    kept, again = (scaled_training(bench, policed=policed) for policed in (False, True))
    bench.figure("scale after 20 steps", kept[1])
    bench.expect(kept[1] == again[1], f"scales {kept[1]} and {again[1]}")
    bench.expect(all(map(torch.equal, kept[0], again[0])), "weights differ after 20 scaled steps")


def scaled_training(bench: Bench, *, policed: bool) -> tuple[list[Tensor], float]:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    model = nn.Sequential(*layers).to(bench.torch)
    if policed:
        apply_policy(model, Policy.recompute(["0", "1", "2", "3"]))
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler(bench.device)
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast(bench.device, torch.float16):
            loss = model(torch.randn(32, 64, device=bench.torch)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach().clone() for parameter in model.parameters()], float(scaler.get_scale())


def check_tf32(bench: Bench) -> None:
    """How far TF32 lies from float64, which is why runs are judged without."""
    bench.needs_values()
    torch.manual_seed(0)
    convs = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(12))).to(bench.torch)
    x = torch.randn(4, 16, 32, 32, device=bench.torch)
    bench.figure("allowed for", ", ".join(tf32_kinds()) or "nothing")
    with torch.no_grad():
        coarse = convs(x).double()
        with without_tf32():
            fine = convs(x).double()
        exact = convs.double()(x.double())
    for name, value in (("as training runs", coarse), ("without TF32", fine)):
        bench.figure(f"{name}, from float64", float((value - exact).norm() / exact.norm()))
    bench.expect(float((fine - exact).norm() / exact.norm()) < 1e-5, "TF32 was not off where runs are judged")


def check_golden_run(bench: Bench) -> None:
    spec = msgspec.structs.replace(
        bench.spec("gpt", optimizer="sgd", n_repeats=1 if bench.tiny else 3),
        model=ModelRef(target="sample_models/gpt.py", arguments=TINY),
    )
    comparison = bench.compared(spec, Policy.recompute(["blocks.0", "blocks.2"]))
    document = to_msgpack(comparison)
    (bench.folder / f"{bench.device}.msgpack").write_bytes(document)
    bench.figure("bytes", len(document))
    bench.figure("verdict", comparison.verdict)
    bench.expect(comparison.failure is None, comparison.failure.sentence if comparison.failure else "")
