"""A figure of the strips above the charts, on every page and in every report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from explorer.record.base import Origin
from explorer.view.text.explore import HEADLINES

Tone = Literal["good", "bad", "neutral"]

LABELS = {
    "step_peak_bytes": "Step peak",
    "saved_after_forward_bytes": "Saved after forward",
    "flop_ratio": "FLOPs",
    "total_flops": "FLOPs",
    "time_ratio": "Step time",
    "step_ms": "Step time",
    "verdict": "Gradients",
    "n_recompute": "Recomputed",
}
"""Labels of the strip, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A figure: its value, the text beside the value, and the origin."""

    key: str = ""
    """The derived figure's name in `--json`; empty if there is none."""
    value: str
    label: str = ""
    """By default that of the figure's key."""
    delta: str = ""
    """Change against the baseline; empty without a baseline."""
    tone: Tone = "neutral"
    origin: tuple[Origin, ...] = ()
    tooltip: str = ""
    """A sentence that a student understands; by default that of the figure's key."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or LABELS[self.key])
        object.__setattr__(self, "tooltip", self.tooltip or HEADLINES[self.key])
