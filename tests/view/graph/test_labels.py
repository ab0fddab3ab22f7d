"""What stands on a block of the drawing."""

from __future__ import annotations

from explorer.record.policy import Policy
from explorer.view.graph.labels import Facts, labels
from tests.graphs import gpt


def test_blocks_of_a_segment_say_that_they_are_recomputed_together() -> None:
    policy = Policy.recompute([("blocks.0", "blocks.1", "blocks.2"), "blocks.4"])
    drawn = labels(Facts(graph=gpt(6), policy=policy))
    assert [drawn[f"blocks.{i}"].note for i in range(3)] == ["1 of 3 together", "2 of 3 together", "3 of 3 together"]
    assert "recomputed as one segment: blocks.0 to blocks.2" in drawn["blocks.1"].title
    for alone in ("blocks.3", "blocks.4"):
        assert "together" not in drawn[alone].note and "segment" not in drawn[alone].title
