"""The solver's answer keeps the rows, is proven, and is none where no choice keeps them."""

from __future__ import annotations

import sys

import pytest

from explorer.errors import NotOnThisDevice
from explorer.plan.planners.highs import TOLERANCE, Question, minimised
from tests.plan.planners.among import WIDE, planner_of


def question(*rows: tuple[dict[int, float], float]) -> Question:
    return Question(rows=rows, for_peak=False, most_cost=None, seconds=10.0)


def test_without_a_limit_nothing_is_recomputed() -> None:
    columns = planner_of(WIDE)._program.columns
    answer = minimised(columns, question())
    assert answer is not None and answer.bound == pytest.approx(0.0, abs=1e-9)
    assert not answer.x[: len(columns.ways)].any()


def test_what_a_row_asks_for_is_taken_and_costs_no_more_than_is_proven() -> None:
    columns = planner_of(WIDE)._program.columns
    answer = minimised(columns, question((dict.fromkeys(range(len(columns.ways)), -1.0), -1.0)))
    assert answer is not None and answer.x[: len(columns.ways)].sum() >= 1 - 1e-6
    cost = float(columns.costs @ answer.x)
    assert 0 < answer.bound <= cost * (1 + 1e-6) and cost <= answer.bound / (1 - TOLERANCE) + 1e-6


def test_rows_that_contradict_each_other_have_no_answer() -> None:
    columns = planner_of(WIDE)._program.columns
    assert minimised(columns, question(({0: 1.0}, 0.0), ({0: -1.0}, -1.0))) is None


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = planner_of(WIDE)._program.columns
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(NotOnThisDevice, match="Planning needs scipy"):
        minimised(columns, question())
