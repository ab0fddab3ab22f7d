"""A graph in every format."""

from __future__ import annotations

import json
from pathlib import Path

from explorer.jobs.client import Worker
from tests.cli.asked import read, run


def test_graph_in_every_format(shared: Worker, tiny: str, tmp_path: Path) -> None:
    graph = read("graph", tiny)
    assert [block["fqn"] for block in graph["blocks"]][:3] == ["", "blocks", "blocks.0"] and graph["fingerprint"]
    assert json.loads(run("graph", tiny, "--format", "json").stdout) == graph
    assert "×3" in run("graph", tiny).stdout
    assert run("graph", tiny, "--format", "dot").stdout.startswith("digraph")
    run("graph", tiny, "--format", "dot", "--out", str(tmp_path / "graph.dot"))
    assert (tmp_path / "graph.dot").read_text().startswith("digraph")
    assert "blocks" not in run("graph", tiny, "--format", "png", code=2).stdout
