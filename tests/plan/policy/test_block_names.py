"""Patterns become blocks, names of two models are compared, and clicks change units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.engine.policy.apply import apply_policy
from explorer.errors import InvalidPolicy
from explorer.plan.policy.block_names import (
    differences,
    expanded,
    joined,
    matching,
    policy_after,
    shape_of,
    unknown_blocks,
)
from explorer.record import KEEP_ALL, Policy, Unit
from tests import graphs
from tests.engine.tiny_nets import ref

NAMES = ["", "embedding", *(f"layers.{i}{part}" for i in range(11) for part in ("", ".mlp", ".mlp.0", ".norm"))]


def test_a_star_is_one_part() -> None:
    assert matching("layers.*.mlp", NAMES) == tuple(f"layers.{i}.mlp" for i in range(11))
    assert matching("layers.1*", NAMES) == ("layers.1", "layers.10")


def test_what_matches_nothing_says_what_is_near() -> None:
    with pytest.raises(InvalidPolicy, match=r"No block matches 'layers\.\*\.mpl'") as error:
        matching("layers.*.mpl", NAMES)
    assert "layers.0.mlp" in error.value.hint


def test_each_match_is_a_unit_of_its_own_and_named_once() -> None:
    policy = Policy.recompute(["layers.1.mlp", "layers.*.mlp"], early_stop=False)
    by_name = expanded(policy, NAMES)
    assert by_name.blocks == ("layers.1.mlp", "layers.0.mlp", *(f"layers.{i}.mlp" for i in range(2, 11)))
    assert not by_name.early_stop
    plain = Policy(units=(Unit(blocks=("layers.0", "layers.1")),))
    assert expanded(plain, NAMES) is plain


def test_a_pattern_is_put_onto_a_model() -> None:
    model = load(ref("gpt")).model
    with apply_policy(model, Policy.recompute(["blocks.*.mlp"])) as handle:
        assert handle.policy.blocks == tuple(f"blocks.{i}.mlp" for i in range(4))
    graph = describe(ref("gpt"))
    assert set(matching("blocks.*.mlp", [block.fqn for block in graph.blocks])) == set(handle.policy.blocks)


def test_numbers_count() -> None:
    assert shape_of(["", "stem", "blocks", "blocks.0", "blocks.0.mlp", "blocks.1", "blocks.1.mlp"]) == {
        "stem": 1, "blocks": 1, "blocks.*": 2, "blocks.*.mlp": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"a": 1}, {"a": 1}, ""),
        ({"blocks.*": 12, "blocks.*.mlp": 12}, {"blocks.*": 16, "blocks.*.mlp": 16}, "blocks.* are 16, and were 12"),
        ({"blocks.*": 2}, {"blocks.*": 1}, "blocks.* is 1, and were 2"),
        ({"norm": 1, "norm.a": 1}, {"adapter": 1}, "new: adapter; gone: norm"),
        ({"blocks.*": 1}, {"blocks.*": 3, "head": 1}, "blocks.* are 3, and was 1; new: head"),
        ({}, dict.fromkeys("abcdef", 1), "new: a, b, c, d and 2 more"),
    ],
)
def test_what_differs(before: dict[str, int], now: dict[str, int], words: str) -> None:
    assert differences(before, now) == words


GRAPH = graphs.gpt(6)
NAMES_OF_MARKS = [block.fqn for block in GRAPH.blocks if block.fqn]


@given(st.sets(st.sampled_from(NAMES_OF_MARKS)), st.sets(st.sampled_from(NAMES_OF_MARKS)))
def test_exactly_the_marked_blocks_are_recomputed(first: set[str], second: set[str]) -> None:
    policy = policy_after(policy_after(KEEP_ALL, first, GRAPH), second, GRAPH)
    assert set(policy.blocks) == second
    assert len(policy.blocks) == len(second)
    order = [NAMES_OF_MARKS.index(unit.blocks[0]) for unit in policy.units]
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
