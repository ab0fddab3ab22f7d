"""What a C library prints while the solver runs does not end up in a program's own output."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from explorer.plan.planners.solver_output import on_stderr

PROGRAM = """
import ctypes, os, sys
from explorer.plan.planners.solver_output import on_stderr
libc = ctypes.CDLL(None)
{before}
print("first", end=" ")
with on_stderr():
    libc.printf(b"noise\\n")
libc.printf(b"second\\n")
libc.fflush(None)
print("third")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="asks the C library of the process")
@pytest.mark.parametrize(
    ("before", "out", "errors"),
    [("", "first second\nthird\n", "noise\n"), ("os.close(2)", "first noise\nsecond\nthird\n", "")],
    ids=["both open", "no stderr"],
)
def test_it_goes_to_stderr_and_what_is_ones_own_stays_in_order(before: str, out: str, errors: str) -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM.format(before=before)], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, errors)
    assert ran.stdout == out


def test_without_a_stdout_the_solver_runs_all_the_same() -> None:
    program = "import os; os.close(1)\n" + PROGRAM.format(before="").replace("libc.printf", "(lambda text: None)")
    ran = subprocess.run([sys.executable, "-c", program.replace('print("', 'str("').replace(', end=" "', "")])
    assert ran.returncode == 0


def test_solvers_of_two_threads_leave_stdout_where_it_was() -> None:
    before, first, second = os.fstat(1), on_stderr(), on_stderr()
    for entering in (first, second):
        entering.__enter__()
    first.__exit__(None, None, None)
    within, errors = os.fstat(1), os.fstat(2)
    second.__exit__(None, None, None)
    assert os.path.samestat(within, errors), "the second is at work still"
    assert os.path.samestat(os.fstat(1), before)
