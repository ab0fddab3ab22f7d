"""From marks to a policy: nothing that stays on loses its unit, its action or its options."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from explorer.plan.policy.block_names import joined, policy_after, unknown_blocks
from explorer.record import KEEP_ALL, Policy, Unit
from tests import graphs

GRAPH = graphs.gpt(6)
NAMES = [block.fqn for block in GRAPH.blocks if block.fqn]


@given(st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES)))
def test_exactly_the_marked_blocks_are_recomputed(first: set[str], second: set[str]) -> None:
    policy = policy_after(policy_after(KEEP_ALL, first, GRAPH), second, GRAPH)
    assert set(policy.blocks) == second
    assert len(policy.blocks) == len(second)
    order = [NAMES.index(unit.blocks[0]) for unit in policy.units]
    assert order == sorted(order)


def test_a_segment_falls_into_what_is_left_of_it() -> None:
    policy = Policy.recompute([tuple(f"blocks.{i}" for i in range(5))])
    after = policy_after(policy, [f"blocks.{i}" for i in (0, 1, 3, 4)], GRAPH)
    assert [unit.blocks for unit in after.units] == [("blocks.0", "blocks.1"), ("blocks.3", "blocks.4")]


def test_actions_and_options_stay() -> None:
    unit = Unit(blocks=("blocks.1",), action="save_ops", save_ops=("aten.mm.default",))
    policy = Policy(units=(unit,), early_stop=False, running_stats="every_forward")
    after = policy_after(policy, ["blocks.1", "blocks.0"], GRAPH)
    assert after.units == (Unit(blocks=("blocks.0",)), unit)
    assert (after.early_stop, after.running_stats) == (False, "every_forward")


def test_two_units_become_one_segment() -> None:
    policy = Policy.recompute(["blocks.0", "blocks.1", "blocks.3"])
    assert [unit.blocks for unit in joined(policy, "blocks.0", "blocks.1").units] == [
        ("blocks.0", "blocks.1"),
        ("blocks.3",),
    ]
    assert joined(policy, "blocks.0", "blocks.2") == policy


def test_blocks_the_model_lacks_are_named() -> None:
    assert unknown_blocks(Policy.recompute(["blocks.9", "head"]), GRAPH) == ("blocks.9",)
