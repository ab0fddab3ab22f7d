"""A pattern names blocks by their place: one star, one part of the path."""

from __future__ import annotations

import pytest

from explorer.engine.model.describe import describe
from explorer.engine.model.load import load
from explorer.engine.policy.apply import apply_policy
from explorer.errors import InvalidPolicy
from explorer.plan.policy.block_names import expanded, matching
from explorer.record import Policy
from explorer.record.policy import Unit
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
