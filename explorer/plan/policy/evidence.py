"""What a comparison proves about a policy, in the few figures that go into its file."""

from __future__ import annotations

from explorer.record.comparison import Comparison
from explorer.record.graph import ModelGraph
from explorer.record.policy_file import Evidence


def evidence_of(comparison: Comparison, graph: ModelGraph | None = None) -> Evidence | None:
    """From the same derived figures that the page and `--json` show. `graph` gives the shapes of the batch.

    None where a run was cut short or only foreseen: that proves nothing.
    """
    if not comparison.comparable or comparison.is_predicted:
        return None
    figures = comparison.headlines()
    baseline, candidate = figures["baseline"], figures["candidate"]
    return Evidence(
        device=comparison.candidate.environment.device_name,
        torch_version=comparison.candidate.environment.torch_version,
        input_shapes=graph.input_shapes if graph else (),
        step_peak_bytes=candidate["step_peak_bytes"],
        baseline_step_peak_bytes=baseline["step_peak_bytes"],
        saved_after_forward_bytes=candidate["saved_after_forward_bytes"],
        baseline_saved_after_forward_bytes=baseline["saved_after_forward_bytes"],
        time_ratio=figures["time_ratio"],
        time_ratio_spread=figures["time_ratio_spread"],
        flop_ratio=figures["flop_ratio"],
        baseline_policy=comparison.baseline.spec.policy if comparison.baseline.spec.policy.units else None,
        verdict=comparison.verdict,
    )
