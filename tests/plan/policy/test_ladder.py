"""Each rung recomputes more than the last, and nothing that a hazard forbids."""

from __future__ import annotations

from explorer.plan.hazards.hazards import hazards
from explorer.plan.policy.presets import ladder, preset
from tests.graphs import gpt


def test_each_rung_recomputes_more_and_stays_safe() -> None:
    graph = gpt(4, n_inner=3)
    rungs = dict(ladder(graph))
    assert list(rungs)[0] == "every block" and rungs["every block"] == preset("all", graph)
    sizes = [len(policy.blocks) for policy in rungs.values()]
    assert sizes == sorted(set(sizes)) and len(sizes) == 3
    assert not any(one.severity == "error" for policy in rungs.values() for one in hazards(graph, policy))
