"""Data is followed by storage: from the one who wrote it to each who reads it, with the bytes that are read."""

from __future__ import annotations

import pytest
from torch import nn

from explorer.record.graph import INPUT
from tests.engine.walk_net import ROW, W, Walk, graph


def test_edges_carry_the_bytes_from_writer_to_reader() -> None:
    flow = {(edge.source, edge.target): edge.n_bytes for edge in graph(Walk(1)).edges}
    assert flow == {
        (INPUT, "stem"): ROW,
        ("stem", "blocks.0.norm"): ROW,
        ("stem", "blocks.0:add"): ROW,
        ("blocks.0.norm", "blocks.0.up"): ROW,
        ("blocks.0.up", "blocks.0.down"): 2 * ROW,
        ("blocks.0.down", "blocks.0:add"): ROW,
        ("blocks.0:add", "head"): ROW,
    }


def test_in_place_operators_become_the_writer() -> None:
    flow = {
        (edge.source, edge.target)
        for edge in graph(nn.Sequential(nn.Linear(W, W), nn.ReLU(inplace=True), nn.Linear(W, W))).edges
    }
    assert flow == {(INPUT, "0"), ("0", "1"), ("1", "2")}


@pytest.mark.parametrize("quiet", [nn.Identity(), nn.Flatten(), nn.Dropout(0.5).eval()], ids=lambda m: type(m).__name__)
def test_a_leaf_without_operators_of_its_own_still_stands_in_the_flow(quiet: nn.Module) -> None:
    described = graph(nn.Sequential(nn.Linear(W, W), quiet, nn.Linear(W, W)))
    flow = {(edge.source, edge.target): edge.n_bytes for edge in described.edges}
    assert flow == {(INPUT, "0"): ROW, ("0", "1"): ROW, ("1", "2"): ROW}
    assert [(cut.n_tensors, cut.n_bytes) for cut in described.cuts] == [(1, ROW), (1, ROW)]
    first = graph(nn.Sequential(quiet, nn.Linear(W, W)))
    assert {(edge.source, edge.target): edge.n_bytes for edge in first.edges} == {(INPUT, "0"): ROW, ("0", "1"): ROW}
    assert [(cut.n_tensors, cut.n_bytes) for cut in first.cuts] == [(1, ROW)]
