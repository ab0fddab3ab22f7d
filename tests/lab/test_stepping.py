"""One optimizer step, or one a store."""

from __future__ import annotations

import pytest

from explorer.lab.kit.rows import DISTANCE
from tests.lab.running import run, value


@pytest.mark.parametrize(("optimizer", "same"), [("sgd", True), ("momentum", False), ("adam", False), ("decay", False)])
def test_only_sgd_may_step_store_by_store(optimizer: str, same: bool) -> None:
    for segments in ("2", "4"):
        off = value(
            run("stepping", optimizer=optimizer, segments=segments),
            "one step for each store, after batch 10",
            DISTANCE,
        )
        assert (off < 1e-12) == same, off
    assert (
        value(run("stepping", optimizer=optimizer, segments="1"), "one step for each store, after batch 10", DISTANCE)
        == 0
    )
