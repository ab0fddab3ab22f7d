"""Policies that need ever less memory, for a step whose baseline does not fit: each rung recomputes more than the last.

all         every block that presets count: the inputs of blocks stay, one block at a time is whole
nested      and the blocks inside and around them: of a whole block only one part at a time is there
everything  and every block at every depth that saves something at all
"""

from __future__ import annotations

from collections.abc import Iterator

from explorer.errors import InvalidPolicy
from explorer.plan.hazards.known import hazards
from explorer.plan.policy.presets import preset
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy


def ladder(graph: ModelGraph) -> Iterator[tuple[str, Policy]]:
    """What each rung recomputes, in words, and the policy; what a hazard forbids is on none."""
    try:
        every = preset("all", graph)
    except InvalidPolicy:  # no block is worth recomputing by itself
        every = Policy()
    rungs = [("every block", every)]
    saving = [block.fqn for block in graph.blocks if block.fqn and block.n_calls and block.saved_bytes]
    parents = [fqn for fqn in saving if graph.children[fqn]]
    for name, blocks in (("blocks inside blocks", parents), ("every block at every depth", saving)):
        rungs.append((name, _without_errors(graph, Policy.recompute(dict.fromkeys([*every.blocks, *blocks])))))
    before = Policy()
    for name, policy in rungs:
        if len(policy.blocks) > len(before.blocks):
            yield name, policy
            before = policy


def _without_errors(graph: ModelGraph, policy: Policy) -> Policy:
    wrong = {fqn for hazard in hazards(graph, policy) if hazard.severity == "error" for fqn in hazard.blocks}
    return Policy.recompute(fqn for fqn in policy.blocks if fqn not in wrong)
