"""A process knows its rank where torchrun set one, and a world of one is nobody's rank."""

from __future__ import annotations

import pytest

from explorer.engine.device.rank import rank_here


@pytest.mark.parametrize(
    ("rank", "world", "expected"), [(None, None, None), ("0", "1", None), ("0", "4", (0, 4)), ("3", "4", (3, 4))]
)
def test_only_one_of_several_has_a_rank(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, world: str | None, expected: tuple[int, int] | None
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert rank_here() == expected
