"""What became of a policy on its way into another program: what is written, and what will really run again there."""

from __future__ import annotations

from typing import Literal

from explorer.record.base import Record
from explorer.record.policy import Policy

Fit = Literal["exact", "approximated", "not expressible"]
Checked = Literal["executed", "grammar"]
"""executed: a test runs the export and counts the blocks that ran again. grammar: held against its documents."""


class Export(Record):
    """One policy file in one form."""

    target: str
    written_for: str
    """Program and version: `transformers 5.23`."""
    fit: Fit = "exact"
    text: str = ""
    """What is written; empty where it is not expressible."""
    recomputed: tuple[str, ...] | None = None
    """Blocks that the target will recompute; None: the form says nothing of single blocks."""
    missing: tuple[str, ...] = ()
    """Blocks that the policy recomputes and the target does not."""
    extra: tuple[str, ...] = ()
    """Blocks that the target recomputes and the policy does not."""
    reasons: tuple[str, ...] = ()
    """Why it is not exact."""
    notes: tuple[str, ...] = ()
    """What whoever takes it has to know."""
    checked: Checked = "grammar"
    as_run: Policy | None = None
    """What the target will really do, as a policy that can be measured; None: no blocks can be named."""
