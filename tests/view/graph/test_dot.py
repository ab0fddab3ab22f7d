"""The block graph as DOT: Graphviz reads it, and no name can leave its quotes."""

from __future__ import annotations

import re
import shutil
import subprocess

import msgspec
import pytest

from explorer.errors import NotOnThisDevice
from explorer.record.graph import INPUT, Edge, ModelGraph
from explorer.view.graph.dot import graph_dot, graph_svg
from tests.graphs import gpt, hostile, unet

QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')


@pytest.mark.parametrize(
    "graph", [gpt(12), gpt(3, n_inner=2), unet(3), hostile()], ids=["gpt", "inner", "unet", "hostile"]
)
@pytest.mark.parametrize("everything", [False, True])
def test_every_edge_ends_at_a_node_that_is_there(graph: ModelGraph, everything: bool) -> None:
    text = graph_dot(graph, [block.fqn for block in graph.blocks] if everything else None)
    nodes = set(re.findall(r'^\s*("(?:[^"\\]|\\.)*") \[label', text, re.M))
    clusters = set(re.findall(r'subgraph ("(?:[^"\\]|\\.)*")', text))
    edges = re.findall(r'^\s*("(?:[^"\\]|\\.)*") -> ("(?:[^"\\]|\\.)*") \[(.*)\]$', text, re.M)
    assert nodes and edges
    for source, target, attributes in edges:
        assert {source, target} <= nodes
        assert set(re.findall(r'l(?:head|tail)=("(?:[^"\\]|\\.)*")', attributes)) <= clusters
    bare = QUOTED.sub("", text)
    assert bare.count("{") == bare.count("}") and "<" not in bare and "img" not in bare


def test_repeats_are_one_node_and_edges_carry_bytes() -> None:
    text = graph_dot(gpt(12))
    assert "×12" in text and "blocks.11" not in text and 'label="0.5 MiB"' in text


def test_what_the_model_is_given_is_a_node() -> None:
    plain = gpt(2)
    graph = msgspec.structs.replace(plain, edges=(Edge(source=INPUT, target="embedding", n_bytes=64), *plain.edges))
    text = graph_dot(graph)
    assert '":input" [label="input"' in text and '":input" -> "embedding"' in text
    assert INPUT not in graph_dot(plain), "a graph of an earlier version does not say what flows in"


def test_svg_needs_the_program_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotOnThisDevice, match="not installed here.*--format dot"):
        graph_svg(gpt(3))


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz's program dot is not installed")
def test_graphviz_reads_it() -> None:
    for graph in (gpt(3), hostile(), unet()):
        subprocess.run(["dot", "-Tsvg"], input=graph_dot(graph), text=True, check=True, capture_output=True)
