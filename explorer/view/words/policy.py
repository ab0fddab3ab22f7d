"""A policy in a few words, for a title."""

from __future__ import annotations

from explorer.record.policy import Policy
from explorer.view.drawing.units import count


def in_words(policy: Policy) -> str:
    """`recompute 12 blocks: blocks.0 ... blocks.11`."""
    if not policy.units:
        return "keep all"
    named = policy.blocks
    listed = ", ".join(named) if len(named) <= 4 else f"{named[0]} ... {named[-1]}"
    segments = sum(len(unit.blocks) > 1 for unit in policy.units)
    joined = f" in {count(len(policy.units), 'unit')}" if segments else ""
    return f"recompute {count(len(named), 'block')}{joined}: {listed}"
