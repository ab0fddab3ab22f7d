"""What a stage of one block costs."""

from __future__ import annotations

from explorer.record.pipeline_cost import ActionCost, StageCost


def cost(stage: int, **fields: int) -> StageCost:
    kept = ActionCost(forward_ms=1.0, backward_ms=2.0, saved_bytes=100, forward_extra_bytes=110,
                      backward_extra_bytes=20, first_backward_extra_bytes=30)  # fmt: skip
    again = ActionCost(forward_ms=1.0, backward_ms=3.0, recompute_ms=1.0, saved_bytes=10, forward_extra_bytes=110,
                       backward_extra_bytes=115, first_backward_extra_bytes=125)  # fmt: skip
    return StageCost(stage=stage, kept=kept, recomputed=again, parameter_bytes=7, gradient_bytes=7, **fields)
