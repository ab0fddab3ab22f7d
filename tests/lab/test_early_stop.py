"""Where a recompute ends."""

from __future__ import annotations

import pytest

from explorer.lab.early_stop import BEGUN, ENDED
from tests.lab.running import run


@pytest.mark.parametrize(
    ("last", "runs"),
    [
        ("linear", {"first": (2, 2), "gelu": (2, 2), "middle": (2, 2), "last": (2, 1)}),
        ("relu", {"first": (2, 2), "gelu": (2, 2), "middle": (2, 2), "last": (2, 1)}),
        ("add", {"first": (2, 2), "gelu": (2, 2), "middle": (2, 1), "last": (1, 1)}),
    ],
)
def test_a_recompute_ends_where_the_last_saved_tensor_is_back(last: str, runs: dict[str, tuple[int, int]]) -> None:
    stopped, whole = run("early-stop", last=last, early_stop="on"), run("early-stop", last=last, early_stop="off")
    for layer, (begun, ended) in runs.items():
        row = stopped.row(layer)
        assert (row.value(BEGUN), row.value(ENDED)) == (begun, ended), layer
        assert (whole.row(layer).value(BEGUN), whole.row(layer).value(ENDED)) == (2, 2)
    assert stopped.row("recomputed").outcome == whole.row("recomputed").outcome == "bitwise equal"
