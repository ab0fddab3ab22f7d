"""What a rival without a policy hands over: a model that it has changed in place."""

from __future__ import annotations

from dataclasses import dataclass

from explorer.engine.step import Trainee


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """Ready to take steps."""

    trainee: Trainee
    predicted_peak_bytes: int | None = None
    note: str = ""
    """What is worth knowing about how it was made, in one sentence."""
