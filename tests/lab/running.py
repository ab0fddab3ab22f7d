"""A lesson run once for all tests that look at it."""

from __future__ import annotations

from functools import cache

from explorer.lab.run import run_lab
from explorer.record.lab import LabOutcome


@cache
def run(name: str, **switches: str) -> LabOutcome:
    return run_lab(name, switches)


def outcomes(name: str, **switches: str) -> dict[str, str]:
    return {row.label: row.outcome for row in run(name, **switches).rows}


def value(outcome: LabOutcome, label: str, name: str) -> float:
    number = outcome.row(label).value(name)
    assert isinstance(number, int | float), (label, name, number)
    return float(number)
