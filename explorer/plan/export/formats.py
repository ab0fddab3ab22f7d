"""A policy file in the form that somebody else needs. One exporter is one function and one line in the table."""

from __future__ import annotations

from collections.abc import Callable

from explorer.errors import InvalidPolicy, nearest
from explorer.plan.export.torch_file import to_torch
from explorer.plan.export.torchrun import to_schedule_csv, to_stages
from explorer.record.policy_file import PolicyFile

EXPORTERS: dict[str, Callable[[PolicyFile], str]] = {
    "torch": to_torch,
    "stages": to_stages,
    "schedule": to_schedule_csv,
}
"""By the name that `export --to` takes."""


def exported(file: PolicyFile, target: str) -> str:
    """The text for `target`. Raises InvalidPolicy for an unknown target, and what the exporter raises."""
    if target not in EXPORTERS:
        raise InvalidPolicy(
            f"There is no exporter {target}.", hint=nearest(target, EXPORTERS) or f"There are {', '.join(EXPORTERS)}."
        )
    return EXPORTERS[target](file)
