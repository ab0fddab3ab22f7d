"""A row computed in a process of its own, and how a process that dies is told."""

from __future__ import annotations

import os
import signal

from explorer.lab.kit.apart import rows_apart
from explorer.lab.kit.bench import LabBench
from explorer.lab.kit.rows import baseline_row, counted
from explorer.record.lab import LabRow


def lives(bench: LabBench, label: str) -> LabRow:
    return baseline_row(label, counted("process", os.getpid()))


def leaves(bench: LabBench, label: str) -> LabRow:
    os._exit(7)


def dies(bench: LabBench, label: str) -> LabRow:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


LEFT = "ended the process with exit code 7: it said nothing"


def test_each_row_has_a_process_and_a_death_is_a_row() -> None:
    alive, left, dead = rows_apart([(lives, ("alive",)), (leaves, ("left",)), (dies, ("dead",))], LabBench())
    assert alive.outcome == "baseline" and alive.value("process") not in (None, os.getpid())
    assert (left.label, left.outcome, left.note) == ("left", "crashed", LEFT)
    assert (dead.label, dead.outcome, dead.note) == ("dead", "crashed", "ended the process by SIGKILL")
