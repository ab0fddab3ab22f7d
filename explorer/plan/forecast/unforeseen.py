"""Policies whose peak is not predicted from a measured baseline, and why, in one sentence."""

from __future__ import annotations

from explorer.plan.forecast.nesting import enclosing
from explorer.plan.names import listed, some, written_results
from explorer.record.graph import ModelGraph
from explorer.record.measurement import Measurement
from explorer.record.policy import Policy


def unforeseen(policy: Policy, graph: ModelGraph | None) -> str:
    """Why the peak of `policy` is not predicted; empty where it is."""
    if outside := not_covered(policy):
        return outside
    written = dict.fromkeys(op for unit in policy.units for op in written_results(unit, graph))
    if written:
        return (
            f"No peak is predicted: torch refuses to keep what {some(tuple(written))} returns, because it is written "
            "in place. Keep operators whose results nothing writes into."
        )
    blocks = {} if graph is None else graph.by_fqn
    handed = tuple(fqn for fqn in policy.blocks if fqn in blocks and "keeps_cache" in blocks[fqn].traits)
    if handed:
        return (
            f"No peak is predicted: {some(handed)} are handed a cache, which the recompute fills a second time. "
            "Switch the cache off in training (use_cache=False)."
        )
    return ""


def not_covered(policy: Policy) -> str:
    """What of `policy` the forecast does not cover; empty: it covers all of it."""
    outer = enclosing(policy)
    nested = {unit for pair in outer.items() for unit in pair if unit.action == "save_ops"}
    parts = (
        ("offload", any(unit.action == "offload" for unit in policy.units)),
        ("reentrant checkpointing", policy.use_reentrant and bool(policy.units)),
        ("kept operators inside or around another unit", bool(nested)),
    )
    named = [part for part, applies in parts if applies]
    return f"The forecast does not cover {listed(named)}: press Run." if named else ""


def no_baseline(run: Measurement) -> str:
    """Why the step with everything kept is not predicted from `run`; empty where it is."""
    policy = run.spec.policy
    if not run.complete:
        return "Nothing is predicted from a run that was cut short. Measure one that fits."
    if not policy.units:
        return ""
    if run.allocations is None or not len(run.allocations.calls.block):
        return "Nothing is predicted from a run with recompute whose timeline has no calls of blocks."
    if policy.use_reentrant:
        return "Nothing is predicted from a run with use_reentrant, which hides what forward saves. Measure another."
    other = tuple(unit.blocks[0] for unit in policy.units if unit.action != "recompute")
    if other:
        return (
            f"Nothing is predicted from a run in which {some(other)} keep chosen operators or offload: the run does "
            "not show all that forward would keep. Measure one that recomputes them."
        )
    return ""
