"""Folding is a quotient: what is in view stands in the order in which data flows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from explorer.record import Edge, ModelGraph, ModelRef
from explorer.view.graph.flow import ranked
from explorer.view.graph.geometry import layout
from tests import graphs


@given(st.integers(1, 12), st.data())
def test_ranks_follow_the_flow_where_there_is_no_cycle(n: int, data: st.DataObject) -> None:
    ids = [str(i) for i in range(n)]
    shuffled = data.draw(st.permutations(ids))
    pairs = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=30))
    forward = [(str(min(pair)), str(max(pair))) for pair in pairs if pair[0] != pair[1]]
    order = ranked(shuffled, forward)
    assert sorted(order) == sorted(ids)
    assert all(order.index(a) < order.index(b) for a, b in forward)


def test_a_cycle_goes_on_with_the_first_that_is_left() -> None:
    assert ranked(["a", "b", "c"], [("a", "b"), ("b", "a"), ("b", "c")]) == ["a", "b", "c"]


def test_residual_additions_are_drawn_where_they_are_in_view() -> None:
    """Into blocks.0 as into one box; inside of it around attention and around the mlp."""
    folded = layout(graphs.gpt(2), ["blocks"])
    assert not folded.joins
    assert [(link.source, link.target, link.n_bytes) for link in folded.links if link.source == "dropout"] == [
        ("dropout", "blocks.0", graphs.MIB // 2)
    ]
    drawing = layout(graphs.gpt(2), ["blocks", "blocks.0"])
    assert [(mark.id, mark.sign) for mark in drawing.joins] == [("blocks.0:add", "+"), ("blocks.0:add.2", "+")]
    name = {"blocks.0:add": "+1", "blocks.0:add.2": "+2"}
    assert {
        (name.get(link.source, link.source), name.get(link.target, link.target), link.kind)
        for link in drawing.links
        if link.source in name or link.target in name or link.source == "dropout"
    } == {
        ("dropout", "blocks.0.attention", "next"),
        ("dropout", "+1", "skip"),
        ("blocks.0.attention", "+1", "next"),
        ("+1", "blocks.0.mlp", "next"),
        ("+1", "+2", "skip"),
        ("blocks.0.mlp", "+2", "next"),
        ("+2", "blocks.1", "next"),
    }


def test_bytes_of_folded_blocks_add_up_on_the_edge() -> None:
    blocks = (
        graphs.block("", "M"),
        graphs.block("a", "A"),
        graphs.block("a.x", "X"),
        graphs.block("a.y", "Y"),
        graphs.block("b", "B"),
    )
    edges = (Edge(source="a.x", target="b", n_bytes=3), Edge(source="a.y", target="b", n_bytes=4))
    graph = ModelGraph(model=ModelRef(target="made"), blocks=blocks, edges=edges)
    assert [(link.source, link.target, link.n_bytes) for link in layout(graph).links] == [("a", "b", 7)]
