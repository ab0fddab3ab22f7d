"""DeepSpeed: its configuration selects nothing."""

from __future__ import annotations

from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile

DEEPSPEED = Target(name="deepspeed", written_for="DeepSpeed of 2026-08-22 (edaa722)")


def to_deepspeed(file: PolicyFile) -> Export:
    return DEEPSPEED.refused(
        "DeepSpeed's JSON says how checkpoints are stored and selects no block: the model's own code does that.",
        "Apply the policy to the model before deepspeed.initialize: export for torch, or explorer.apply_policy.",
    )
