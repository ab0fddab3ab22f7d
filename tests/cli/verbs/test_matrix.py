"""Derivatives and checkpointing as a table and as a document."""

from __future__ import annotations

from explorer.jobs.client import Worker
from tests.cli.asked import read, run


def test_a_matrix_of_derivatives(shared: Worker, tiny: str) -> None:
    document = read("matrix", tiny, "--policy", "every-2")
    assert {cell["outcome"] for cell in document["cells"]} >= {"bitwise equal"}
    assert "backward" in run("matrix", tiny, "--policy", "every-2").stdout
