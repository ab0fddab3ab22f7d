"""The request of the lab, and the function that answers it in a job's process."""

from __future__ import annotations

from explorer.jobs.rows import RequestRow
from explorer.lab.record import LabOutcome
from explorer.record.base import Record
from explorer.record.graph import ModelRef
from explorer.record.plan import Report
from explorer.record.run import Device


class RunLab(Record, tag=True):
    """-> LabOutcome: one experiment of the lab; switches without a value have their defaults."""

    name: str
    switches: dict[str, str] = {}
    device: Device = "cpu"
    model: ModelRef | None = None
    """Model for a lesson that takes a model; None: the lesson's model."""


ROWS = {RunLab: RequestRow("run_lab", LabOutcome, ("lab",), "Running", module=__name__)}
KINDS: dict[str, type[Record]] = {}
"""Kinds of record that the store keeps: none."""
WARM = ("explorer.lab.engine.run",)
"""Modules that the server of jobs imports while it is idle."""


def run_lab(request: RunLab, report: Report) -> Record:
    from explorer.lab.engine import run

    return run.run_lab(request.name, request.switches, device=request.device, model=request.model, report=report)
