"""Megatron's recompute by method, number and stage: groups are segments where layers hand on."""

from __future__ import annotations

import pytest

from explorer.errors import InvalidPolicy
from explorer.plan.imports.door import read
from explorer.record.graph import ModelGraph
from explorer.record.policy import Policy, Unit
from tests.plan.imports.layers import FULL, LAYERS, joinable


def test_a_group_of_layers_is_a_segment_where_they_hand_on(graph: ModelGraph) -> None:
    text = f"{FULL} uniform --recompute-num-layers 3 --pipeline-model-parallel-size 2"
    groups = [LAYERS[0:3], LAYERS[3:4], LAYERS[4:7], LAYERS[7:8]]
    joined = read(text, joinable(graph))
    assert "Read by its documented grammar; Megatron-LM itself was not run." in joined.notes
    assert joined.fit == "exact" and joined.policy.units == tuple(Unit(blocks=group) for group in groups)
    apart = read(text, graph)
    assert apart.fit == "approximated" and apart.policy == Policy.recompute(LAYERS)
    assert "layers.0 and layers.1 and layers.2 cannot be recomputed together here" in apart.reasons[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{FULL} sideways", "recompute_method is 'sideways'"),
        (f"{FULL} block --recompute-num-layers 0", "recompute_num_layers is 0"),
        (f"{FULL} block --pipeline-model-parallel-size 3", "8 layers do not go evenly into 3 stages"),
        ("recompute_granularity: full\nrecompute_layer_ids: '0,8'", "no layer 8; they go from 0 to 7"),
        ("--recompute-granularity half", "no granularity 'half'"),
        (
            "--recompute-granularity selective --recompute-modules core_attn",
            "no block of this model stands for core_attn",
        ),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_value(text: str, words: str, graph: ModelGraph) -> None:
    with pytest.raises(InvalidPolicy, match=words):
        read(text, graph)
