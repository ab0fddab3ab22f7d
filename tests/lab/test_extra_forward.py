"""The recompute's operations, counted."""

from __future__ import annotations

import pytest

from tests.lab.running import run, value


@pytest.mark.parametrize(
    ("blocks", "early_stop", "forwards"),
    [
        ("all", "off", 1.0),
        ("all", "on", 0.5),
        ("second", "off", 0.5),
        ("second", "on", 0.25),
        ("nested", "off", 2.0),
    ],
)
def test_recompute_is_counted_exactly(blocks: str, early_stop: str, forwards: float) -> None:
    outcome = run("extra-forward", blocks=blocks, early_stop=early_stop)
    assert value(outcome, "recompute", "recompute") == forwards * value(outcome, "keep", "forward")
    assert outcome.row("recompute").outcome == "bitwise equal"
