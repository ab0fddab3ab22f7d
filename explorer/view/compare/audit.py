"""What a gradient does not show: random generators, dropout masks and module state after the recompute, as tables."""

from __future__ import annotations

from typing import Any

from explorer.record.comparison import Comparison


def rng_table(comparison: Comparison) -> list[dict[str, Any]]:
    """Each random generator: whether both runs left it in the same place."""
    return [
        {"generator": diff.generator, "after the step": "same position" if diff.equal else "different position"}
        for diff in sorted(comparison.rng, key=lambda diff: diff.equal)
    ]


def mask_table(comparison: Comparison) -> list[dict[str, Any]]:
    """Each dropout module: the mask of forward against the one drawn at recompute, worst first."""
    return [
        {
            "block": diff.block,
            "elements": diff.n_elements,
            "mismatched": diff.n_mismatched,
            "mismatch share": diff.mismatch_share,
            "verdict": "different mask" if diff.n_mismatched else "same mask",
        }
        for diff in sorted(comparison.masks, key=lambda diff: -diff.mismatch_share)
    ]


def state_change_table(comparison: Comparison) -> list[dict[str, Any]]:
    """Each buffer or plain attribute that the recompute changed once more."""
    return [
        {
            "block": change.block,
            "name": change.name,
            "kind": change.kind,
            "after forward": change.after_forward,
            "after backward": change.after_backward,
        }
        for change in comparison.state_changes
    ]


def recompute_count_table(comparison: Comparison) -> list[dict[str, Any]]:
    """Each block that ran again, and each that the policy names but that did not."""
    costs = comparison.candidate.by_fqn
    named = set(comparison.candidate.spec.policy.blocks)
    return [
        {
            "block": fqn,
            "in the policy": fqn in named,
            "ran forward": costs[fqn].n_forward if fqn in costs else None,
            "ran again": costs[fqn].n_recompute if fqn in costs else None,
        }
        for fqn in dict.fromkeys([*(fqn for fqn, cost in costs.items() if cost.n_recompute), *named])
        if fqn
    ]
