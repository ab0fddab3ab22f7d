"""Skips in a tuple, and a process that may die."""

from __future__ import annotations

from tests.lab.running import outcomes


def test_skips_in_a_tuple_break_reentrant_and_as_arguments_do_not() -> None:
    nested, direct = outcomes("nested-skips", danger="tuple"), outcomes("nested-skips", danger="arguments")
    assert nested["non-reentrant"] == direct["non-reentrant"] == "bitwise equal"
    assert nested["reentrant"] in ("raised", "different", "crashed")
    assert direct["reentrant"] in ("rounding", "bitwise equal")
