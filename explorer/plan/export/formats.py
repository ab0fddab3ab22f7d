"""A policy file in the form that somebody else needs. A new form is a function and its row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from explorer.errors import InvalidPolicy, nearest
from explorer.plan.export.torch_file import to_torch
from explorer.plan.export.torchrun import NEEDS, to_schedule_csv, to_stages
from explorer.record.policy_file import PolicyFile


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """One form: what `export --to NAME` writes."""

    name: str
    write: Callable[[PolicyFile], str]
    note: str = ""
    """What the text does not carry, for whoever takes it."""


_ROWS = (
    ExportFormat(name="torch", write=to_torch),
    ExportFormat(name="stages", write=to_stages, note=NEEDS),
    ExportFormat(name="schedule", write=to_schedule_csv, note=NEEDS),
)
FORMATS = {row.name: row for row in _ROWS}


def export_format(name: str) -> ExportFormat:
    """Raises InvalidPolicy for an unknown name."""
    if name not in FORMATS:
        raise InvalidPolicy(
            f"There is no exporter {name}.", hint=nearest(name, FORMATS) or f"There are {', '.join(FORMATS)}."
        )
    return FORMATS[name]


def exported(file: PolicyFile, name: str) -> str:
    """The text of the form. Raises InvalidPolicy for an unknown name, and what the form raises."""
    return export_format(name).write(file)
