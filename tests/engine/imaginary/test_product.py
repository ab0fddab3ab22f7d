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
