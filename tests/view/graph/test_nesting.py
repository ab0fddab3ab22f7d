"""What nests in what: equal siblings are one node, everything has one parent, and what is hidden can be opened."""

from __future__ import annotations

import pytest

from explorer.record.graph import ModelGraph
from explorer.view.graph.nesting import RUN, ancestors, default_open, nest
from tests import graphs

MODELS = {"gpt": graphs.gpt(4), "deep": graphs.gpt(3, n_inner=4), "unet": graphs.unet()}


@pytest.mark.parametrize("name", MODELS)
def test_every_block_is_drawn_once_below_its_parent(name: str) -> None:
    graph = MODELS[name]
    nodes = nest(graph)
    assert {block.fqn for block in graph.blocks} <= set(nodes)
    assert list(nodes)[0] == "" and nodes[""].parent is None
    below = [child for node in nodes.values() for child in node.children]
    assert sorted(below) == sorted(id for id in nodes if id), "each is a child of exactly one"
    order = list(nodes)
    assert all(order.index(str(node.parent)) < order.index(id) for id, node in nodes.items() if id)


def test_a_container_of_equals_is_the_run_and_equals_among_others_get_a_node() -> None:
    nodes = nest(graphs.gpt(4))
    assert nodes["blocks"].members == tuple(f"blocks.{i}" for i in range(4))
    inner = nest(graphs.gpt(1, n_inner=3))
    runs = [node for id, node in inner.items() if id.startswith(RUN)]
    assert all(node.members == node.children and not node.toggles for node in runs)
    assert not any(node.members for node in nest(graphs.unet()).values()), "no level is as another"


def test_the_model_itself_and_what_is_never_called_cannot_be_toggled() -> None:
    graph: ModelGraph = graphs.gpt(2)
    nodes = nest(graph)
    assert not nodes[""].toggles and nodes["blocks.0"].toggles
    assert {id for id, node in nodes.items() if node.toggles} == {
        block.fqn for block in graph.blocks if block.fqn and block.n_calls
    }


@pytest.mark.parametrize("name", MODELS)
def test_with_its_ancestors_open_a_block_is_in_view(name: str) -> None:
    graph = MODELS[name]
    nodes = nest(graph)
    for fqn in (block.fqn for block in graph.blocks if block.fqn):
        opened = ancestors(graph, fqn)
        parent = nodes[fqn].parent
        assert parent in (*opened, "") and list(opened) == sorted(opened, key=list(nodes).index)
    assert ancestors(graph, "nothing") == ()


def test_at_first_only_what_holds_much_is_open_and_runs_are_folded() -> None:
    graph = graphs.gpt(4)
    assert not any(nest(graph)[id].members for id in default_open(graph))
