"""A budget is the share of saved bytes that a policy left, where a run said so."""

from __future__ import annotations

from explorer.plan.export.formats import exported
from explorer.record.policy import Policy
from explorer.record.policy_file import Evidence, PolicyFile


def test_a_budget_is_the_share_that_is_left() -> None:
    measured = Evidence(
        device="a CPU", torch_version="2.13", saved_after_forward_bytes=30, baseline_saved_after_forward_bytes=120
    )
    form = exported(PolicyFile(policy=Policy.recompute(["layers.0"]), evidence=measured), "memory-budget")
    assert "activation_memory_budget = 0.250" in form.text and form.fit == "approximated"
