"""A policy by name, by blocks and by file: what it means on a model, and what is said of one that changed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from explorer.errors import InvalidPolicy
from explorer.plan.policy import file as policy_file
from explorer.plan.policy.read_policy import named, read
from explorer.record.files import PolicyFile
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit
from tests.graphs import gpt

LAYERS = [f"layers.{index}" for index in range(8)]


@pytest.fixture
def graph() -> ModelGraph:
    return gpt(8, names="layers")


def test_patterns_of_a_policy_file_become_names_and_are_reported(graph: ModelGraph) -> None:
    text = """\
version: 1
policy:
  units:
  - layers.*.mlp
  - {blocks: [layers.3.mlp], action: offload}
  - [layers.*.attention, layers.*]
"""
    reading = read(text.replace("  - [layers.*.attention, layers.*]\n", ""), graph)
    assert len(reading.policy.units) == 8
    assert reading.policy.units[-1] == Unit(blocks=("layers.3.mlp",), action="offload")
    assert "layers.*.mlp stands for 8 units: layers.0.mlp, layers.1.mlp, layers.2.mlp and 5 more." in reading.notes
    pairs = read(text.replace("  - layers.*.mlp\n", "").replace("layers.*]", "layers.*.mlp]"), graph).policy.units
    assert Unit(blocks=("layers.0.attention", "layers.0.mlp")) in pairs and len(pairs) == 8
    with pytest.raises(InvalidPolicy, match=r"No block matches 'layer\.\*\.mlp'"):
        read(text.replace("layers.*.mlp", "layer.*.mlp"), graph)


def test_blocks_are_named_as_they_are_or_by_patterns(graph: ModelGraph) -> None:
    assert named("layers.1.mlp", graph).policy == Policy.recompute(["layers.1.mlp"])
    both = named("layers.0,layers.*.attention", graph).policy
    assert both.blocks[0] == "layers.0" and len(both.units) == 9
    with pytest.raises(InvalidPolicy, match="neither a preset, nor a block, nor a file"):
        named("layers.1,layer.2", graph)


def test_a_changed_model_is_applied_by_name_with_a_sentence(graph: ModelGraph) -> None:
    text = policy_file.dumps(policy_file.file_of(Policy.recompute(LAYERS[:2]), graph))
    assert read(text, graph).messages == ()
    deeper = read(text, gpt(12, names="layers"))
    assert deeper.policy == Policy.recompute(LAYERS[:2])
    assert "layers.* are 12, and were 8" in deeper.changed and "new" not in deeper.changed
    wider = tuple(replace(block, parameter_bytes=7) for block in graph.blocks)
    assert "kinds or parameters" in read(text, replace(graph, blocks=wider)).changed
    with pytest.raises(InvalidPolicy, match=r"no block layers\.0, layers\.1 \(2 of the 2.*new: blocks; gone: layers"):
        read(text, gpt(8, names="blocks"))


def test_a_file_by_hand_is_judged_by_its_names(graph: ModelGraph) -> None:
    by_hand = policy_file.dumps(PolicyFile(policy=Policy.recompute(["layers.1"])))
    assert read(by_hand, graph).messages == ()
    with pytest.raises(InvalidPolicy, match=r"no block layer\.1 ") as caught:
        read(by_hand.replace("layers.1", "layer.1"), graph)
    assert "Did you mean layers.1" in caught.value.hint
    stale = policy_file.dumps(PolicyFile(policy=Policy.recompute(["layers.1"]), fingerprint="0" * 16))
    assert "names, kinds or parameters differ" in read(stale, graph).changed
