"""What can go wrong with a policy or a plan on a model, known before any run."""

from __future__ import annotations

from typing import Literal

from explorer.record.base import Record


class Hazard(Record):
    """One rule that fired. `check` prints it, the page draws it as a badge on its blocks."""

    rule: str
    """Short name, such as `running-statistics`."""
    severity: Literal["error", "warning", "note"]
    """error: wrong or refused for certain. warning: wrong under some conditions. note: worth knowing."""
    blocks: tuple[str, ...]
    sentence: str
    remedy: str
