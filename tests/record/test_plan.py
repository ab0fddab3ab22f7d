"""A certificate says how far from the best a plan can be, and never claims more than was proven."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.record.plan import Certificate


def certificate(gap: float, n_candidates: int = 24, n_solves: int = 3) -> Certificate:
    return Certificate(bound=1.0, gap=gap, n_candidates=n_candidates, n_rows=7, n_solves=n_solves)


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (0.0, "proven the best choice among 24 candidates, in 3 solves"),
        (0.001, "within 0.1 % of the best choice among 24 candidates, in 3 solves"),
        (1.0, "the best that was found among 24 candidates, in 3 solves; nothing is proven"),
    ],
)
def test_a_script_prints_a_sentence(gap: float, words: str) -> None:
    assert str(certificate(gap)) == words


def test_one_is_one() -> None:
    assert str(certificate(0.0, 1, 1)) == "proven the best choice among 1 candidate, in 1 solve"


@given(st.floats(min_value=1e-9, max_value=0.99))
def test_the_gap_is_never_said_smaller_than_it_is(gap: float) -> None:
    said = re.match(r"within ([\d.]+) %", str(certificate(gap)))
    assert said is not None and gap <= float(said[1]) / 100 * (1 + 1e-12) <= gap + 1.1e-4
