"""Marks are those of the run, and one guess of a peak is right."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from explorer.plan.challenges import CHALLENGES, is_about, marks, peak_guesses
from explorer.record.comparison import Comparison
from explorer.record.policy import Policy
from explorer.record.run import RunSpec
from tests.graphs import compared, gpt

GPT = CHALLENGES["gpt"]


@pytest.fixture(scope="module")
def run() -> Comparison:
    graph = gpt(6)
    policy = RunSpec(model=GPT.model, policy=Policy.recompute([f"blocks.{i}" for i in range(5)]))
    return compared(graph, policy)


def test_each_mark_is_what_the_run_says(run: Comparison) -> None:
    peak, ratio = run.candidate.step_peak_bytes, run.headlines()["flop_ratio"]
    assert peak is not None and ratio is not None and is_about(GPT, run)
    just = msgspec.structs.replace(GPT, peak_bytes=peak, flop_ratio=ratio)
    assert [mark.met for mark in marks(just, run)] == [True, True, True]
    tight = msgspec.structs.replace(GPT, peak_bytes=peak - 1, flop_ratio=ratio - 1e-9)
    assert [mark.met for mark in marks(tight, run)] == [False, False, True]


def test_another_model_is_another_matter(run: Comparison) -> None:
    assert not is_about(CHALLENGES["resnet"], run)


def test_names_are_what_one_types() -> None:
    assert all(name == one.name and name.isidentifier() for name, one in CHALLENGES.items())


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
