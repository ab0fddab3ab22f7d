"""Three ways to merge stores."""

from __future__ import annotations

import pytest

from tests.lab.running import outcomes


@pytest.mark.parametrize("segments", ["2", "4", "12"])
def test_adding_is_right_and_overwriting_is_wrong_for_shared_weights(segments: str) -> None:
    rows = outcomes("gradient-stores", net="recurrent", segments=segments)
    assert rows["one store, added"] == rows["torch's checkpoint"] == "bitwise equal"
    assert rows["one store, overwritten"] == "different"
    assert rows["stores added up afterwards"] in ("rounding", "bitwise equal")
    assert set(outcomes("gradient-stores", net="chain", segments=segments).values()) == {
        "baseline",
        "bitwise equal",
    }
