"""The solver's answer keeps the rows, is proven, and is none where no choice keeps them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from explorer.errors import NotOnThisDevice
from explorer.plan.planners.solver import TOLERANCE, Question, minimised
from tests.plan.planners.samples import WIDE, planner_of

ROOT = Path(__file__).resolve().parents[3]


def threads_now() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def question(*rows: tuple[dict[int, float], float]) -> Question:
    return Question(rows=rows, for_peak=False, most_cost=None, seconds=10.0)


def test_without_a_limit_nothing_is_recomputed() -> None:
    variables = planner_of(WIDE)._program.variables
    answer = minimised(variables, question())
    assert answer is not None and answer.bound == pytest.approx(0.0, abs=1e-9)
    assert not answer.x[: len(variables.of_choice)].any()


def test_what_a_row_asks_for_is_taken_and_costs_no_more_than_is_proven() -> None:
    variables = planner_of(WIDE)._program.variables
    answer = minimised(variables, question((dict.fromkeys(range(len(variables.of_choice)), -1.0), -1.0)))
    assert answer is not None and answer.x[: len(variables.of_choice)].sum() >= 1 - 1e-6
    cost = float(variables.costs @ answer.x)
    assert 0 < answer.bound <= cost * (1 + 1e-6) and cost <= answer.bound / (1 - TOLERANCE) + 1e-6


def test_rows_that_contradict_each_other_have_no_answer() -> None:
    variables = planner_of(WIDE)._program.variables
    assert minimised(variables, question(({0: 1.0}, 0.0), ({0: -1.0}, -1.0))) is None


def test_without_the_solver_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = planner_of(WIDE)._program.variables
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(NotOnThisDevice, match="Planning needs highspy"):
        minimised(variables, question())


def test_a_solve_prints_nothing_and_starts_no_thread(capfd: pytest.CaptureFixture[str]) -> None:
    variables, before = planner_of(WIDE)._program.variables, threads_now()
    assert minimised(variables, question((dict.fromkeys(range(len(variables.of_choice)), -1.0), -1.0))) is not None
    assert capfd.readouterr().out == "" and threads_now() <= before


def test_a_solver_of_other_code_with_threads_does_not_stand_in_the_way() -> None:
    """HiGHS 1.15 refuses a call whose number of threads differs from that of the first call of the process."""
    program = """
from highspy import Highs
first = Highs()
for option, value in (("output_flag", False), ("threads", 2)):
    first.setOptionValue(option, value)
first.run()
from tests.plan.planners.test_solver import question
from tests.plan.planners.samples import WIDE, planner_of
from explorer.plan.planners.solver import minimised
assert minimised(planner_of(WIDE)._program.variables, question()) is not None
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
