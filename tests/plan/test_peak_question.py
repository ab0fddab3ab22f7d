"""Predict first: the forecast is among the answers, once, and no other answer says nearly the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from explorer.plan.challenges import peak_guesses

sizes = st.integers(1, 10**12)


@given(sizes, sizes, sizes)
def test_one_answer_is_right_and_the_others_lie_apart(peak: int, saved: int, foreseen: int) -> None:
    guesses = peak_guesses(peak, saved, foreseen)
    (right,) = (guess for guess in guesses if guess.right)
    assert right.peak_bytes == foreseen
    answers = [guess.peak_bytes for guess in guesses]
    assert all(one - other > 0.05 * foreseen for one, other in zip(answers, answers[1:]))


def test_what_people_usually_think_is_offered() -> None:
    answers = [guess.peak_bytes for guess in peak_guesses(200, 150, 70)]
    assert answers == [200, 100, 70, 50]
