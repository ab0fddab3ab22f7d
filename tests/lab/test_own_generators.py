"""Random numbers that torch does not stash."""

from __future__ import annotations

import pytest

from tests.lab.running import outcomes


@pytest.mark.parametrize("source", ["generator", "python", "numpy", "torch"])
def test_other_generators_are_wrong_until_named(source: str) -> None:
    expected = "bitwise equal" if source == "torch" else "different"
    unnamed, named = (
        outcomes("own-generators", source=source, restore="no"),
        outcomes("own-generators", source=source, restore="yes"),
    )
    assert unnamed["reentrant"] == unnamed["non-reentrant"] == expected
    assert named["reentrant"] == named["non-reentrant"] == "bitwise equal"
