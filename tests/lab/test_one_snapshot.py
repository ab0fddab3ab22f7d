"""Snapshots in the wrong place."""

from __future__ import annotations

from tests.lab.running import outcomes, run


def test_one_snapshot_for_the_model_gives_every_block_the_first_mask() -> None:
    own, first = "agrees with its own forward", "agrees with block0's forward"
    model, block = run("one-snapshot", snapshot="model"), run("one-snapshot", snapshot="block")
    assert [row.value(first) for row in model.rows[2:]] == [1, 1, 1, 1]
    assert [row.value(own) == 1 for row in model.rows[2:]] == [True, False, False, False]
    assert [row.value(own) for row in block.rows[2:]] == [1, 1, 1, 1]
    assert block.row("recomputed").outcome == "bitwise equal"
    assert outcomes("one-snapshot", snapshot="none")["recomputed"] == "different"
