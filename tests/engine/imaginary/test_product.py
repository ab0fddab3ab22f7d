"""The product on the imaginary card: bytes are torch's own, and what the card has not is said."""

from __future__ import annotations

from explorer.plan.card.cards import parse_card
from tests.engine.imaginary.test_run import has_cuda_build, values_on

COMPARED = """
from explorer.engine.compare.compare import compare
from explorer.record import KEEP_ALL, ModelRef, Policy, RunSpec
from msgspec.structs import replace
kept = RunSpec(model=ModelRef(target="sample_models/gpt.py"), device="cuda", n_repeats=3)
both = compare(kept, replace(kept, policy=Policy.recompute(["blocks.0", "blocks.1"])))
out["verdict"], out["why"] = both.verdict, both.not_reproducible_because
runs = both.baseline, both.candidate
out["times"] = [run.times is not None and run.times.step.median_ms is not None for run in runs]
out["peaks"] = [[run.step_peak_bytes, run.peaks.requested_peak_bytes] for run in runs]
out["where"] = both.baseline.environment.device_name
"""


@has_cuda_build
def test_a_comparison_has_bytes_and_neither_values_nor_times() -> None:
    seen = values_on(parse_card("h100"), COMPARED)
    assert seen["verdict"] == "not comparable" and "imaginary" in str(seen["why"])
    assert seen["times"] == [False, False] and "imaginary" in str(seen["where"])
    (kept, counted), (recomputed, counted_again) = seen["peaks"]  # type: ignore[misc]
    assert kept == counted > recomputed == counted_again


RECORDED = """
import os
os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # a setting counts on every card
import explorer
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(512, 64, device="cuda")
def step():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
step()
with explorer.record_step(model, optimizer) as run:
    step()
peaks = run.measurement.peaks
out["allocator"] = [peaks.allocated_peak_bytes, peaks.reserved_peak_bytes]
out["played"] = [run.on_card("h100").headlines()[name] for name in ("allocated_bytes", "reserved_bytes")]
out["budget"] = [explorer.auto_policy(model, step, budget=card).card.allocated_bytes for card in ("h100", "t4")]
"""


@has_cuda_build
def test_a_step_recorded_there_is_played_on_a_card_to_the_byte() -> None:
    seen = values_on(parse_card("h100"), RECORDED)
    assert seen["played"] == seen["allocator"]
    on_h100, on_t4 = seen["budget"]  # type: ignore[misc]
    assert on_h100 - on_t4 == 2 * (33_554_432 - 8_519_680), "the workspaces of two threads, torch 2.13"
