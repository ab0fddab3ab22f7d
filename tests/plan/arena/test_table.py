"""Who is in the arena: every file of the folder, under its own name."""

from __future__ import annotations

import pytest

from explorer.errors import BadInput
from explorer.plan.arena.table import OURS, chosen, parse_shares, rivals


def test_every_rival_has_words_and_a_way_to_take_part() -> None:
    known = rivals()
    assert OURS in known and next(iter(known)) == "keep-all"
    for name, rival in known.items():
        assert rival.title and rival.source, name
        assert (rival.choose is None) == bool(rival.module), name
        assert rival.takes_budget or rival.choose is not None, name


def test_only_names_that_are_known_are_chosen_and_all_without_any() -> None:
    assert chosen(()) == rivals()
    assert list(chosen(("rotor", "greedy"))) == ["greedy", "rotor"]
    with pytest.raises(BadInput, match="no rival 'rotr'") as error:
        chosen(("rotr",))
    assert "rotor" in error.value.hint


def test_budgets_are_shares() -> None:
    assert parse_shares("0.3, 50%,0.3") == (0.3, 0.5)
    for text in ("0", "1.5", "200%", "much", ""):
        with pytest.raises(BadInput, match="is no share"):
            parse_shares(text)
