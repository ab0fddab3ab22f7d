"""What recomputing changed in an autograd graph is said in the record's own figures."""

from __future__ import annotations

from explorer.record.graph import AutogradPicture, AutogradPictures
from explorer.view.graph.dot import difference

KEPT = AutogradPicture(dot="", n_nodes=62, n_saved_tensors=20, saved_bytes=15 * 2**20)


def pair(n_nodes: int) -> AutogradPictures:
    recomputed = AutogradPicture(dot="", n_nodes=n_nodes, n_saved_tensors=1, saved_bytes=2**19)
    return AutogradPictures(block="blocks.0", kept=KEPT, recomputed=recomputed)


def test_non_reentrant_recompute_keeps_the_nodes_and_empties_them() -> None:
    sentence = difference(pair(62))
    assert sentence == "The 62 nodes stay; recomputed they hold 1 saved tensor (0.5 MiB) instead of 20 (15.0 MiB)."


def test_reentrant_recompute_replaces_them() -> None:
    assert difference(pair(3)).startswith("62 nodes became 3;")
