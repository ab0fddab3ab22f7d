"""Number formats: autocast in both 16-bit formats, loss scaling, and TensorFloat-32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from explorer import apply_policy
from explorer.engine.model.describe import describe
from explorer.engine.state.global_state import tf32_kinds, without_tf32
from explorer.plan.policy.presets import preset
from explorer.record import Policy
from tests.gpu.kit import Bench, Skipped


def check_autocast(bench: Bench) -> None:
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
