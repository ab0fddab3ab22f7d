"""What a graph says about its blocks beyond their fields."""

from __future__ import annotations

import msgspec

from explorer.record.graph import ModelGraph, ModelRef
from tests.graphs import block, gpt


def test_children_of_a_called_sequential_follow_each_other() -> None:
    blocks = (block("", "M"), block("body", "Sequential"), block("body.0", "A"), block("body.1", "B"))
    chain = ModelGraph(model=ModelRef(target="made"), blocks=blocks, edges=())
    assert chain.next_in_turn == {"body.0": "body.1"}
    iterated = msgspec.structs.replace(
        chain,
        blocks=(
            *blocks[:1],
            block("body", "Sequential", n_calls=0),
            *blocks[2:3],
            block("body.1", "B", follows="body.0"),
        ),
    )
    assert iterated.next_in_turn == {}


def test_elsewhere_blocks_follow_what_hands_on_to_them() -> None:
    graph = gpt(4)
    assert graph.next_in_turn == {}, "an older record does not know"
    follows = {"blocks.1": "blocks.0", "blocks.3": "blocks.2", "head": "norm"}
    blocks = tuple(msgspec.structs.replace(one, follows=follows.get(one.fqn, "")) for one in graph.blocks)
    graph = msgspec.structs.replace(graph, blocks=blocks)
    assert graph.next_in_turn == {"blocks.0": "blocks.1", "blocks.2": "blocks.3", "norm": "head"}
