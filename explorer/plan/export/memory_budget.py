"""torch.compile's activation memory budget: one number, the share of saved bytes that the compiler may keep."""

from __future__ import annotations

from explorer.plan.export.outcome import Target
from explorer.record.policy_file import Export, PolicyFile

MEMORY_BUDGET = Target(name="memory-budget", written_for="torch 2.13")


def to_memory_budget(file: PolicyFile) -> Export:
    """The share that the policy left of the baseline's saved bytes, when it was measured."""
    evidence = file.evidence
    saved = evidence.saved_after_forward_bytes if evidence else None
    baseline = evidence.baseline_saved_after_forward_bytes if evidence else None
    if saved is None or not baseline or (evidence and evidence.baseline_policy):
        return MEMORY_BUDGET.refused(
            "A budget is the share of saved bytes that is left, and this file holds no run against everything kept.",
            "`python -m explorer compare MODEL --policy FILE --out FILE` measures it.",
        )
    share = min(1.0, saved / baseline)
    text = f"import torch._functorch.config\n\ntorch._functorch.config.activation_memory_budget = {share:.3f}\n"
    return Export(
        target=MEMORY_BUDGET.name,
        written_for=MEMORY_BUDGET.written_for,
        fit="approximated",
        text=text,
        reasons=("The compiler chooses operators by itself, in every compiled region; blocks are not named.",),
        notes=("With dropout its gradients can be wrong (pytorch issue 190717): compare before you train.",),
    )
