"""A process knows its rank where torchrun set one, and a world of one is nobody's rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from explorer.engine.device.rank import of_rank, rank_here, rank_in_words


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


def test_files_and_words_name_the_rank_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("runs/oom.explorer")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (of_rank(path), rank_in_words()) == (path, "")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    assert (of_rank(path), rank_in_words()) == (Path("runs/oom.rank3.explorer"), ", rank 3")
