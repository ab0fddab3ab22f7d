"""Traps of reentrant checkpointing alone."""

from __future__ import annotations

from explorer.plan.hazards.hazards import hazards
from tests.plan.hazards.case_of import OPTIONS, A, block, graph, rules, spec


def test_frozen_blocks_before_a_reentrant_one() -> None:
    policy = OPTIONS["reentrant"]
    assert "reentrant-frozen" in rules(hazards(graph(block("a")), policy, spec=spec(frozen=("embedding",))))
    assert "reentrant-frozen" not in rules(hazards(graph(block("a")), policy, spec=spec()))


def test_autocast_with_reentrant() -> None:
    autocast = spec(autocast="bfloat16")
    assert "reentrant-autocast" in rules(hazards(graph(block("a")), OPTIONS["reentrant"], spec=autocast))
    assert "reentrant-autocast" not in rules(hazards(graph(block("a")), A, spec=autocast))
