"""Traps of any checkpointing: what stands below a named block counts, what no longer runs does not."""

from __future__ import annotations

from explorer.plan.hazards.hazards import hazards
from explorer.record.policy import Policy, Unit
from tests.plan.hazards.case_of import A, block, graph, rules, spec


def test_a_trap_below_a_named_block_counts_and_one_beside_it_does_not() -> None:
    net = graph(block("a", "python_rng"), block("a.drop", "python_rng"), block("ab", "python_rng"))
    foreseen = hazards(net, A)
    assert [(hazard.rule, hazard.blocks) for hazard in foreseen] == [("python-rng", ("a.drop",))]


def test_eval_mode_draws_no_dropout_and_moves_no_statistics() -> None:
    net = graph(block("a", "uses_rng", "running_statistics", "moves_buffers"))
    policy = Policy.recompute(["a"], preserve_rng_state=False, running_stats="every_forward")
    assert hazards(net, policy, spec=spec(mode="eval")) == ()


def test_an_offloaded_block_does_not_run_again() -> None:
    policy = Policy(units=(Unit(blocks=("a",), action="offload"),))
    net = graph(block("a", "python_rng"))
    assert rules(hazards(net, policy, spec=spec(device="cuda"))) == []
    assert rules(hazards(net, policy, spec=spec(device="cpu"))) == ["offload-without-device"]
