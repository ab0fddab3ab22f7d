"""A layer that counts its forwards."""

from __future__ import annotations

import pytest

from tests.lab.running import run, value


@pytest.mark.parametrize("steps", ["1", "5"])
def test_a_layer_that_asks_counts_right(steps: str) -> None:
    silent, asks = run("asking-layer", asks="no", steps=steps), run("asking-layer", asks="yes", steps=steps)
    assert value(silent, "recomputed, last step", "forwards counted") == 2 * int(steps)
    assert silent.row("recomputed, first step").outcome == "different"
    assert value(asks, "recomputed, last step", "forwards counted") == int(steps)
    assert asks.row("recomputed, last step").outcome == "bitwise equal"
